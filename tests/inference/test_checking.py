"""``SWPipeline(check_effects=True)``: a run stops if the plan lets tasks access out of order."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from swpipe import (
    DeclaredIO,
    IterContext,
    PipelinePlan,
    PipelineTask,
    SWPipeline,
    TaskSchedule,
    overlap,
)
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.races import guarantees, race_problems
from swpipe.analysis.verification import verify_for_run
from swpipe.core.effects import Effects
from swpipe.core.plan import BODY
from swpipe.core.resolved import resolve_plan
from swpipe.device import resolve
from swpipe.errors import PlanError
from swpipe.inference import record, watched_gradients
from swpipe.inference.operators import OperatorRecorder
from swpipe.inference.places import KeptOrders, Place
from tests.support.machines import TorchMachine, tasks_of
from tests.support.safety import effects_of, random_pair, verify_tasks
from tests.support.sequencer import await_event

BATCHES = 13


def batches(count: int = BATCHES) -> list[torch.Tensor]:
    """Return equal small batches."""
    draws = torch.Generator().manual_seed(1)
    return [torch.rand(3, 4, generator=draws) for _ in range(count)]


def on_threads(*names: str, stages: Sequence[int] = (), **order: Any) -> PipelinePlan:
    """Return a plan with a thread for each task, the last one on the caller's."""
    stages = stages or [0] * len(names)
    groups = {name: name for name in names[:-1]}
    return PipelinePlan(
        {
            name: TaskSchedule(stage, thread_group=groups.get(name, "default"))
            for name, stage in zip(names, stages, strict=True)
        },
        **order,
    )


def checked(
    plan: PipelinePlan,
    functions: Iterable[Callable[[Any], None]],
    share: float | None = True,
    **options: Any,
) -> Any:
    """Return a pipeline that checks effects; a function becomes a task of its name."""
    tasks = [
        f if isinstance(f, PipelineTask) else PipelineTask(f.__name__, f)  # type: ignore[attr-defined]
        for f in functions
    ]
    return SWPipeline(plan, tasks, device="cpu", check_effects=share, **options)


def stopped(pipe: SWPipeline, count: int = BATCHES) -> tuple[int, PlanError]:
    """Return the number of iterations until the pipeline was stopped, and the error."""
    done: list[int] = []
    with pipe, pytest.raises(PlanError, match="check_effects") as caught:
        done.extend(ctx.iter_idx for ctx in pipe.iterate(batches(count)))
    return len(done), caught.value


def finished(pipe: SWPipeline, count: int = BATCHES) -> int:
    """Return the number of iterations that the pipeline ran without an error."""
    with pipe:
        return sum(1 for _ in pipe.iterate(batches(count)))


class Training:
    """A model whose optimizer steps in every ``every``-th iteration."""

    def __init__(self, every: int = 4) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.every = every

    def forward(self, ctx: IterContext) -> None:
        """Read the parameters."""
        ctx.loss = self.model(ctx.batch).square().mean()

    def backward(self, ctx: IterContext) -> None:
        """Write the gradients."""
        ctx.loss.backward()

    def step(self, ctx: IterContext) -> None:
        """Write the parameters, in some iterations."""
        if (ctx.iter_idx + 1) % self.every == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def norm(self) -> Any:
        """Return the sum of the existing gradients."""
        return sum(p.grad.sum() for p in self.model.parameters() if p.grad is not None)

    @property
    def tasks(self) -> list[PipelineTask]:
        """The tasks in serial order."""
        return [PipelineTask(f.__name__, f) for f in (self.forward, self.backward, self.step)]


GRADIENT = "the gradient of a parameter (float32 ["

RIGHT = {
    "deps": [("backward", "forward"), ("step", "backward")],
    "cross_iter_deps": [("forward", "step")],
}


# ------------------------------------------------------------------------- what tasks really do


def test_it_does_not_depend_on_the_order_in_which_the_two_just_ran() -> None:
    """Here they always run in serial order: the reader waits, which the plan does not know."""
    state = torch.zeros(3)
    written = [threading.Event() for _ in range(BATCHES)]

    def write(ctx: IterContext) -> None:
        state.add_(ctx.batch.sum())
        written[ctx.iter_idx].set()

    def read(ctx: IterContext) -> None:
        assert written[ctx.iter_idx].wait(30)
        ctx.copy = state.clone()

    _, error = stopped(checked(on_threads("write", "read"), [write, read]))
    assert "'read'" in str(error)
    assert "'write'" in str(error)


def test_two_touch_one_place_at_the_same_time() -> None:
    """A comparison of before and after would blame the reader of the other's state as well."""
    states = {"left": torch.zeros(3), "right": torch.zeros(3)}
    meeting = threading.Barrier(2, timeout=30)

    def left(ctx: IterContext) -> None:
        meeting.wait()
        states["left"].add_(1)
        meeting.wait()

    def right(ctx: IterContext) -> None:
        meeting.wait()
        states["right"].add_(1)
        meeting.wait()

    assert finished(checked(on_threads("left", "right"), [left, right])) == BATCHES


def test_gradients_that_another_task_clears() -> None:
    """Clearing is no operator, and the next gradients are in other memory."""
    training = Training(every=1)
    cleared: list[threading.Event] = []

    def train(ctx: IterContext) -> None:
        cleared.append(threading.Event())
        assert not ctx.iter_idx or cleared[ctx.iter_idx - 1].wait(30)
        training.forward(ctx)
        training.backward(ctx)
        ctx.norm = training.norm()

    def clear(ctx: IterContext) -> None:
        training.optimizer.zero_grad()
        cleared[ctx.iter_idx].set()

    plan = on_threads("clear", "train", stages=(1, 0), deps=[("clear", "train")])
    _, error = stopped(checked(plan, [train, clear]))
    assert GRADIENT in str(error)
    assert '("train", "clear", 1)' in str(error)
    plan = replace(plan, cross_iter_deps=[("train", "clear")])
    cleared.clear()
    assert finished(checked(plan, [train, clear])) == BATCHES


def test_gradients_that_another_task_reads() -> None:
    """It reads them on another thread, before the next ones exist, which are in other memory."""
    training = Training(every=1)
    looked = [threading.Event() for _ in range(BATCHES)]

    def train(ctx: IterContext) -> None:
        assert not ctx.iter_idx or looked[ctx.iter_idx - 1].wait(30)
        training.optimizer.zero_grad()
        training.forward(ctx)
        training.backward(ctx)

    def look(ctx: IterContext) -> None:
        ctx.norm = training.norm()
        looked[ctx.iter_idx].set()

    def last(ctx: IterContext) -> None:
        pass

    plan = on_threads("look", "train", "last", stages=(1, 0, 1), deps=[("look", "train")])
    _, error = stopped(checked(plan, [train, look, last]))
    assert GRADIENT in str(error)
    assert '("train", "look", 1)' in str(error)


def test_gradients_that_another_task_clears_by_hand() -> None:
    """It is detected on the caller's thread, while no other task runs."""
    training = Training(every=1)

    def train(ctx: IterContext) -> None:
        training.forward(ctx)
        training.backward(ctx)

    def clear(ctx: IterContext) -> None:
        for parameter in training.model.parameters():
            parameter.grad = None

    schedule = {"train": TaskSchedule(), "clear": TaskSchedule(1)}
    plan = PipelinePlan(schedule, deps=[("clear", "train")], order=["train", "clear"])
    _, error = stopped(checked(plan, [train, clear]))
    assert GRADIENT in str(error)
    assert '("train", "clear", 1)' in str(error)


def test_two_tasks_that_draw_from_torchs_generator_now_and_then() -> None:
    """Two random tasks, or a dropout with nothing to drop, are no error."""

    def noise(ctx: IterContext) -> None:
        if ctx.iter_idx == 4:
            ctx.noise = torch.rand(3)

    def drop(ctx: IterContext) -> None:
        ctx.dropped = nn.functional.dropout(ctx.batch, 0.5)

    def keep(ctx: IterContext) -> None:
        ctx.dropped = torch.rand(0)

    _, error = stopped(checked(on_threads("noise", "drop"), [noise, drop]))
    assert "torch's default generators" in str(error)
    assert "iteration 4" in str(error)
    random = [PipelineTask("noise", noise, random=True), PipelineTask("drop", drop, random=True)]
    assert finished(checked(on_threads("noise", "drop"), random)) == BATCHES
    assert finished(checked(on_threads("noise", "keep"), [noise, keep])) == BATCHES
    half = [PipelineTask("noise", noise, random=True), PipelineTask("drop", drop)]
    stopped(checked(on_threads("noise", "drop"), half))


def test_to_make_nothing_is_no_draw_whoever_draws_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default generators' states change during both operators here."""
    states = iter(range(100))
    monkeypatch.setattr(OperatorRecorder, "_states", lambda recorder: [next(states)])
    for size, drawn in ((0, set()), (1, {0})):
        recorder = OperatorRecorder(resolve("cpu"))
        with recorder:
            torch.rand(size)
        assert recorder.draws.keys() == drawn


def test_generators_of_the_users_own() -> None:
    """A generator that two tasks share is a state; one that each iteration makes is not."""
    shared = torch.Generator().manual_seed(1)

    def noise(ctx: IterContext, own: torch.Generator | None = None) -> None:
        draws = own or torch.Generator().manual_seed(ctx.iter_idx)
        ctx.noise = torch.rand(3, generator=draws)

    def drop(ctx: IterContext, own: torch.Generator | None = None) -> None:
        draws = own or torch.Generator().manual_seed(-1 - ctx.iter_idx)
        ctx.dropped = torch.rand(3, generator=draws)

    assert finished(checked(on_threads("noise", "drop"), [noise, drop]), 100) == 100
    both = [PipelineTask(one.__name__, partial(one, own=shared)) for one in (noise, drop)]
    _, error = stopped(checked(on_threads("noise", "drop"), both))
    assert "touched state '<torch._C.Generator" in str(error)


# ---------------------------------------------------------------------------- no false alarms


def test_buffers_that_are_used_in_turn() -> None:
    """Two buffers suffice for a plan in which a copy is one iteration ahead; one does not."""
    for count in (2, 1):
        buffers = [torch.zeros(3, 4) for _ in range(count)]

        def copy(ctx: IterContext, buffers: list[torch.Tensor] = buffers) -> None:
            buffers[ctx.iter_idx % len(buffers)].copy_(ctx.batch)

        def compute(ctx: IterContext, buffers: list[torch.Tensor] = buffers) -> None:
            ctx.sum = buffers[ctx.iter_idx % len(buffers)].sum()

        order = {"deps": [("compute", "copy")], "cross_iter_deps": [("copy", "compute", 2)]}
        pipe = checked(on_threads("copy", "compute", stages=(0, 1), **order), [copy, compute])
        if count == 2:
            assert finished(pipe) == BATCHES
        else:
            stopped(pipe)


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "recorded"])
def test_staleness_that_the_plan_allows(declared: bool) -> None:
    """It is allowed by the state's declared name, or by the recorded name of all parameters."""
    model = nn.Linear(4, 2).requires_grad_(False)
    io = [DeclaredIO(state="weights", mode="rw", memory=model)] if declared else []

    def read(ctx: IterContext) -> None:
        ctx.out = model(ctx.batch)

    def write(ctx: IterContext) -> None:
        for parameter in model.parameters():
            parameter.add_(ctx.out.sum())

    tasks = [PipelineTask("read", read), PipelineTask("write", write, io=io)]
    order = {"deps": [("write", "read")], "same_period_deps": [("write", "read")]}
    plan = on_threads("read", "write", stages=(0, 1), **order)
    _, error = stopped(checked(plan, tasks))
    assert ("set stale={'weights': 1}" if declared else "set stale={'unnamed mem") in str(error)
    names = ["weights"] if declared else [f"unnamed memory (float32 {n})" for n in ([2, 4], [2])]
    stale = dict.fromkeys(names, 1)
    assert finished(checked(replace(plan, stale=stale), tasks)) == BATCHES


@pytest.mark.parametrize("seed", range(16))
def test_a_run_is_stopped_exactly_if_its_plan_is_refused_for_what_the_tasks_touch(
    seed: int,
) -> None:
    """Tasks and plans are random; half keep the serial order; a read may come too early."""
    plan, workload = random_pair(seed)
    wrong = race_problems(effects_of(workload), guarantees(resolve_plan(plan), streams=False))
    machine = TorchMachine(workload, lambda: None)
    tasks = tasks_of(machine, workload, draws=True)
    with SWPipeline(plan, tasks, device="cpu", check_effects=True) as pipe:
        if wrong:
            with pytest.raises((PlanError, AttributeError)):
                pipe.run(range(8))
        else:
            assert pipe.run(range(8)).iterations == 8


# -------------------------------------------------------------------------------- what is known


@pytest.mark.parametrize(("others", "writes"), [("", False), ("", True), ("r", True)])
def test_who_says_nothing_is_seen_to_touch_what_is_said_to_be_apart(
    others: Any, writes: bool
) -> None:
    """The error comes in the first iteration, with both names; an allowed read continues.

    If others may read and write, nothing is watched.
    """
    table = torch.ones(3)
    io = [DeclaredIO(state="table", mode="r", memory=[table], others=others)]

    def silent(ctx: IterContext) -> None:
        ctx.y = table.add_(1) if writes else table + 1

    tasks = [
        PipelineTask("look", lambda ctx: setattr(ctx, "x", table.sum()), io),
        PipelineTask("silent", silent),
    ]
    plan = PipelinePlan.serial(tasks)
    plan = replace(plan, pipeline_depth=2)
    with SWPipeline(plan, tasks, device="cpu") as pipe, pytest.raises(PlanError) as caught:
        pipe.run(batches())
    text = str(caught.value)
    assert "'silent' " + ("writes" if writes else "reads") + " state 'table' on iteration 0" in text
    assert f"'look' declares that no such task does: others={others!r}" in text
    read = [tasks[0], PipelineTask("silent", lambda ctx: setattr(ctx, "y", table + 1))]
    if others == "r":
        with SWPipeline(plan, read, device="cpu") as pipe:
            assert pipe.run(batches()).iterations == BATCHES
    shared = replace(tasks[0], io=[replace(io[0], others="rw")])
    with SWPipeline(plan, [shared, tasks[1]], device="cpu") as pipe:
        assert pipe._driver.engine.check is None  # nothing is said that could be broken


APART = DeclaredIO(state="a word", mode="r", others="")


@pytest.mark.parametrize("what", ["an attribute", "memory"])
def test_a_branch_that_the_recording_did_not_see(what: str) -> None:
    """The plan was verified for the recording, which does not show all that tasks do."""
    state = torch.zeros(4)
    decoded = [threading.Event() for _ in range(BATCHES)]

    def decode(ctx: IterContext) -> None:
        ctx.decoded = ctx.batch.tolist()
        state.add_(1)
        decoded[ctx.iter_idx].set()

    def look(ctx: IterContext) -> None:
        if ctx.iter_idx == 9:
            await_event(decoded[9], "the other task")
            ctx.seen = ctx.decoded if what == "an attribute" else state.sum()

    tasks = [PipelineTask(f.__name__, f, io=[APART]) for f in (decode, look)]
    recording = record(tasks, batches(1)[0], device="cpu")
    # The body does not touch the state.
    effects = {**recording.effects, BODY: Effects()}
    plan = on_threads("decode", "look", pipeline_depth=2)
    verify_tasks(plan, tasks, effects=effects)
    done, error = stopped(checked(plan, tasks, None, effects=effects))
    assert done == 9
    assert "iteration 9 touched " + ("ctx.decoded" if what == "an attribute" else "") in str(error)


def test_what_is_declared_proves_the_plan_of_an_overlapped_loop() -> None:
    """Only the claims of its pure tasks are watched."""
    seen: list[int] = []

    def look(ctx: IterContext) -> None:
        seen.append(len(_get_current_dispatch_mode_stack()))

    tasks = [PipelineTask("decode", lambda ctx: None, pure=True), PipelineTask("look", look)]
    io = [DeclaredIO(state="weights", mode="rw")]
    for last in (tasks[1], PipelineTask("look", look, io=io)):
        assert len([*overlap(batches(), [tasks[0], last], device="cpu")]) == BATCHES
    assert seen == [0] * 2 * BATCHES


# ------------------------------------------------------------------------ a share of iterations


def test_windows_of_iterations_are_watched_and_the_first_ones() -> None:
    """Each window is as long as two tasks may be apart; the other iterations run as without it."""
    seen: list[bool] = []
    mode = PipelineTask("mode", lambda ctx: seen.append(bool(_get_current_dispatch_mode_stack())))
    plan = PipelinePlan({"mode": TaskSchedule()}, pipeline_depth=3)
    with checked(plan, [mode], 0.1) as pipe:
        pipe.run(range(2_000))
    assert all(seen[:16])
    assert 0.08 < sum(seen[16:]) / len(seen[16:]) <= 0.12
    lengths = [len(run) for run in "".join(".x"[one] for one in seen[16:-4]).split(".")]
    assert all(length >= 4 for length in lengths[1:] if length)


def test_what_a_task_does_now_and_then_is_met_in_the_end() -> None:
    """It is detected at the same iteration each time."""
    total = torch.zeros(4)

    def add(ctx: IterContext) -> None:
        if (ctx.iter_idx + 1) % 20 == 0:
            total.add_(1)

    def use(ctx: IterContext) -> None:
        ctx.x = total + 1

    plan = on_threads("add", "use")
    counts = {stopped(checked(plan, [add, use], 0.2), count=1_000)[0] for _ in range(2)}
    (count,) = counts
    assert 16 <= count < 1_000


def test_a_share_that_is_none_is_refused() -> None:
    """The error has the rule."""
    task = PipelineTask("a", lambda ctx: None)
    share: Any
    for share in (0, 1.5, "all"):
        with pytest.raises(ValueError, match="give True, False, or the share of the iterations"):
            checked(PipelinePlan.serial([task]), [task], share)


# -------------------------------------------------------------------------------- what is left


def test_nothing_is_watched_without_it() -> None:
    """Contexts are of the user's own class, and operators run as usual."""
    seen: list[Any] = []

    def look(ctx: IterContext) -> None:
        seen.append((type(ctx), len(_get_current_dispatch_mode_stack())))

    plan = PipelinePlan.serial([PipelineTask("look", look)])
    for check in (False, True):
        with SWPipeline(plan, check_effects=check, device="cpu") as pipe:
            pipe.run(range(1))
            pipe.run_serial(range(1))
    assert seen[0] == seen[1] == seen[3] == (IterContext, 0)
    assert seen[2][1] == 1


EVERY_FOURTH = (
    r"check_effects: task '\w+' on iteration \d touched .*(gradient of a parameter|unnamed memory)"
    r".*, which '\w+' on iteration \d touches as well, and the plan does not keep their order"
)


def test_each_run_is_checked_for_itself() -> None:
    """After a stopped run, iterations have the same numbers again."""
    training = Training()
    # Of one layer: its backward uses no parameter, and autograd does not notice a step before it.
    training.model = nn.Sequential(nn.Linear(4, 1))
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    plan = on_threads("forward", "step", "backward", stages=(0, 1, 0), deps=RIGHT["deps"][:1])
    with checked(plan, training.tasks) as pipe:
        assert pipe.run(batches(3)).iterations == 3
        for _ in range(2):
            with pytest.raises(PlanError, match=EVERY_FOURTH):
                pipe.run(batches())


def test_iterations_of_a_run_that_was_dropped_are_not_compared_with() -> None:
    """The next run has their numbers again, and swaps the two buffers."""
    buffers = [torch.zeros(3, 4), torch.zeros(3, 4)]

    def copy(ctx: IterContext) -> None:
        ctx.buffer = buffers[ctx.iter_idx % 2]
        ctx.buffer.copy_(ctx.batch)

    def compute(ctx: IterContext) -> None:
        ctx.sum = ctx.buffer.sum()

    order = {"deps": [("compute", "copy")], "cross_iter_deps": [("copy", "compute", 2)]}
    with checked(on_threads("copy", "compute", stages=(0, 1), **order), [copy, compute]) as pipe:
        for _ in range(3):
            next(pipe.iterate(batches()))
            pipe.drop()
            buffers.reverse()
            assert pipe.run(batches()).iterations == BATCHES


def test_how_many_orders_are_asked_does_not_grow_with_the_depth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tasks are compared on one iteration and on the next: all other orders follow."""
    state = torch.zeros(3)
    asked: set[tuple[str, str, int]] = set()
    keeps = HappensBefore.keeps

    def noted(order: HappensBefore, first: str, then: str, distance: int, **of: bool) -> bool:
        asked.add((first, then, distance))
        return keeps(order, first, then, distance, **of)

    def read(ctx: IterContext) -> None:
        ctx.out = ctx.batch + state.sum()

    def write(ctx: IterContext) -> None:
        state.add_(1)

    deps, back = [("write", "read")], [("read", "write")]
    plan = on_threads("read", "write", deps=deps, cross_iter_deps=back, pipeline_depth=300)
    with checked(plan, [read, write]) as pipe:
        monkeypatch.setattr(HappensBefore, "keeps", noted)
        assert pipe.run(batches()).iterations == BATCHES
    assert asked >= {("read", "write", 0), ("write", "read", 1), ("write", "write", 1)}
    assert {distance for *_, distance in asked} == {0, 1}


def test_what_is_noted_does_not_grow_with_the_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locations whose memory or iteration is gone are dropped."""
    monkeypatch.setattr("swpipe.inference.pruned_dict._SPARE", 60)
    training = Training()
    pipe = checked(on_threads("forward", "step", "backward", **RIGHT), training.tasks)
    with pipe:
        contexts = pipe.iterate(batches(1) * 90)
        for number, _ in enumerate(contexts):
            if number == 80:
                check = pipe._driver.run.iterations.check
                assert len(check._places._places) < 150
                assert max(len(place.runs) for place in check._places._places.values()) < 50


def test_the_memory_of_a_gradient_has_its_name() -> None:
    """Two tasks use the gradient at the same time, after it was accumulated."""
    training = Training(every=1)

    def train(ctx: IterContext) -> None:
        for step in (training.step, training.forward, training.backward):
            step(ctx)

    def scale(ctx: IterContext) -> None:
        for parameter in training.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def look(ctx: IterContext) -> None:
        ctx.norm = training.norm()

    deps = [("scale", "train"), ("look", "train")]
    back = [("train", "scale"), ("train", "look")]
    plan = on_threads("scale", "look", "train", deps=deps, cross_iter_deps=back)
    _, error = stopped(checked(plan, [train, scale, look]))
    assert GRADIENT in str(error)
    assert re.search(r"which '(look|scale)' on iteration 0 touches", str(error))


def test_gradients_are_read_only_while_no_task_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one thread reads ``parameter.grad`` while another one trains, torch may crash.

    ``alone`` comes after its iteration's ``look`` and before the next one's; therefore it runs
    alone. The next iteration's ``look`` lasts as long as ``train``, and is not watched from 16 on.
    """
    count, training = 19, Training(every=1)
    begun = [threading.Event() for _ in range(count + 1)]
    trained = [threading.Event() for _ in range(count)]
    begun[count].set()
    looks: list[int] = []
    looks_at_each_read: list[int] = []

    def read(parameter: torch.Tensor) -> torch.Tensor | None:
        looks_at_each_read.append(len(looks))
        return parameter.grad

    def look(ctx: IterContext) -> None:
        looks.append(ctx.iter_idx)
        begun[ctx.iter_idx].set()
        if ctx.iter_idx:
            await_event(trained[ctx.iter_idx - 1], "the training beside it")
        looks.remove(ctx.iter_idx)

    def alone(_ctx: IterContext) -> None:
        pass

    def wait(ctx: IterContext) -> None:
        await_event(begun[ctx.iter_idx + 1], "the next iteration")

    def train(ctx: IterContext) -> None:
        for task in training.tasks:
            task.fn(ctx)

    def after(ctx: IterContext) -> None:
        trained[ctx.iter_idx].set()

    monkeypatch.setattr(watched_gradients, "grad_or_none", read)
    tasks = [look, alone, wait, train, after]
    schedule = {name: TaskSchedule(1) for name in ("alone", "wait", "train", "after")}
    plan = PipelinePlan(
        {"look": TaskSchedule(thread_group="look"), **schedule},
        deps=[("alone", "look"), ("train", "wait"), ("after", "train")],
        same_period_deps=[("look", "alone")],
    )
    assert finished(checked(plan, tasks, None), count) == count
    # Beside ``alone`` both neighbours are watched on 1 to 14: four gradients, before and after.
    assert len(looks_at_each_read) >= 14 * 2 * 4
    assert not any(looks_at_each_read)
    serial = PipelinePlan.serial([PipelineTask("train", train)])
    reads_before = len(looks_at_each_read)
    assert finished(checked(serial, [train]), 3) == 3
    # Four parameters: after the first training, which shows them, and around the two that follow.
    assert len(looks_at_each_read) == reads_before + (1 + 2 * 2) * 4


def test_tasks_of_one_period_on_two_threads_are_watched_without_a_word() -> None:
    """Tasks of neighbouring iterations are, too; a plan with one thread and one stage is not."""
    total = torch.zeros(3, 4)

    def fill(ctx: Any) -> None:
        total.add_(ctx.batch)

    def read(ctx: Any) -> None:
        ctx.mean = total.mean()

    done, error = stopped(checked(on_threads("fill", "read"), [fill, read], share=None))
    assert done <= 1
    assert 'add deps=[("read", "fill")]' in str(error)
    alone = PipelinePlan({"fill": TaskSchedule(0), "read": TaskSchedule(0)})
    with checked(alone, [fill, read], share=None) as pipe:
        assert pipe._driver.engine.check is None


def test_what_workers_keep_in_order_need_not_be_kept_further_apart() -> None:
    """Each does every third iteration: a task is in order at 3 and 6, but not at 4."""
    schedule = {
        "read": TaskSchedule(thread_group="io", workers=3),
        "train": TaskSchedule(1),
    }
    plan = PipelinePlan(schedule, deps=[("train", "read")], pipeline_depth=8)
    tasks = [PipelineTask(name, print, pure=True) for name in schedule]
    orders = KeptOrders(verify_for_run(plan, tasks, None, device="cpu", streams=False))
    place = Place("memory", 1)
    kept = [orders.keeps(place, "read", "read", distance) for distance in (1, 3, 4, 6, 7)]
    assert kept == [False, True, False, True, False]
