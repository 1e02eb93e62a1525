"""``record`` itself: arguments, failures, restored state, and its plan."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from swpipe import DeclaredIO, PipelinePlan, PipelineTask, SWPipeline, TaskProfiler, TaskSchedule
from swpipe._state.loop import LoopState
from swpipe.analysis import verify
from swpipe.core.effects import UNDECLARED, Effects, undeclared_effects
from swpipe.core.plan import PULL
from swpipe.errors import PlanError, UnsavedStateError
from swpipe.inference import record
from tests.inference.helpers import WORD, orders, process_group, reads, recorded, writes


def nothing(ctx: Any) -> None:
    """Do nothing."""


def test_arguments_that_cannot_be_used() -> None:
    """They are no tasks, two of one name, a bad number of iterations, an object without state."""
    task = PipelineTask("a", nothing)
    with pytest.raises(PlanError, match="the plan is empty"):
        record([], None)
    with pytest.raises(PlanError, match="'a' is given 2 times"):
        record([task, task], None)
    for iterations in (0, True):
        with pytest.raises(ValueError, match="integer of 1 or more"):
            record([task], None, iterations=iterations)
    with pytest.raises(TypeError, match="cannot be restored"):
        record([task], None, state=[object()])


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_a_task_failure_is_raised_as_itself(error: BaseException) -> None:
    """It gets a note of its place; the model is restored, and recording has ended."""
    model = nn.Linear(2, 1)

    def train(ctx: Any) -> None:
        with torch.no_grad():
            model.weight.add_(1)

    def fail(ctx: Any) -> None:
        if ctx.iter_idx == 1:
            raise error

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(type(error)) as caught:
        recorded(train, fail)
    assert caught.value is error
    assert "raised by task 'fail', iteration 1, while its effects were being recorded" in str(
        error.__notes__
    )
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert _get_current_dispatch_mode() is None


def test_compiled_functions_run_eagerly() -> None:
    """Recording disables ``torch.compile``."""
    model = nn.Linear(2, 2)

    def refuse(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise AssertionError("compiled")

    compiled = torch.compile(model, backend=refuse)

    def forward(ctx: Any) -> None:
        ctx.y = compiled(ctx.batch)

    found = recorded(forward, batch=torch.ones(1, 2))
    assert any("parameters" in state for state in reads(found, "forward"))


def test_under_inference_mode_and_autocast() -> None:
    """Reads are recorded under both."""
    model = nn.Linear(2, 2)

    def evaluate(ctx: Any) -> None:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            ctx.y = model(ctx.batch)

    def double(ctx: Any) -> None:
        with torch.inference_mode():
            ctx.y.mul_(2)

    found = recorded(evaluate, double, batch=torch.ones(1, 2))
    assert "Linear parameters" in reads(found, "evaluate")
    assert writes(found, "double") == {"ctx.y"}


def test_a_lazy_module_gets_the_parameters_that_its_first_batch_would_make() -> None:
    """They stay after a recording, which finds the order; watched runs have the serial numbers."""
    batches = [torch.rand(3, 4, generator=torch.Generator().manual_seed(n)) for n in range(5)]
    plan = PipelinePlan(
        {"decode": TaskSchedule(thread_group="io"), "forward": TaskSchedule(1)},
        deps=[("forward", "decode")],
    )

    def made(*, pure: bool = True) -> list[PipelineTask]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(2))

        def decode(ctx: Any) -> None:
            ctx.x = torch.cat([ctx.batch, ctx.batch.flip(0) + torch.arange(4.0)], 1)

        def forward(ctx: Any) -> None:
            ctx.y = model(ctx.x).sum()
            ctx.y.backward()

        return [PipelineTask("decode", decode, pure=pure), PipelineTask("forward", forward)]

    def losses(plan: PipelinePlan, tasks: list[PipelineTask], check: bool | None) -> list[float]:
        with SWPipeline(plan, tasks, device="cpu", check_effects=check) as pipe:
            return [ctx.y.item() for ctx in pipe.iterate(batches)]

    tasks = made()
    serial = losses(PipelinePlan.serial(tasks), tasks, False)
    assert losses(plan, made(), None) == serial
    assert losses(plan, made(pure=False), True) == serial
    tasks = made()
    assert ("forward", "decode") in record(tasks, batches[0], device="cpu").plan().deps
    assert losses(plan, tasks, None) == serial


def test_sparse_gradients_are_recorded() -> None:
    """They are recorded as indices and values."""
    table = nn.EmbeddingBag(5, 2, sparse=True, mode="sum")
    optimizer = torch.optim.SparseAdam(table.parameters())

    def backward(ctx: Any) -> None:
        optimizer.zero_grad()
        table(ctx.batch).sum().backward()

    def step(ctx: Any) -> None:
        optimizer.step()

    found = recorded(backward, step, batch=torch.tensor([[0, 1], [1, 4]]))
    assert "EmbeddingBag.weight" in reads(found, "backward")
    assert "EmbeddingBag.weight.grad" in reads(found, "step")
    assert orders(found) == {("step", "backward", 0), ("backward", "step", 1)}


def test_a_module_as_task_and_lists_of_modules() -> None:
    """Modules and tensors in plain lists and dicts of a module are found."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Linear(2, 2)]

        def forward(self, ctx: Any) -> None:
            ctx.y = self.hidden[0](torch.ones(1, 2))

    found = record([PipelineTask("run", Holder())], None, device="cpu")
    assert set(found.states["Holder parameters"]) == {
        "Holder.hidden[0].weight",
        "Holder.hidden[0].bias",
    }


def test_a_task_that_communicates_is_globally_ordered(tmp_path: Path) -> None:
    """The schedule and the notes say so; the plan keeps the tasks, and has the inferred order."""

    def reduce(ctx: Any) -> None:
        torch.distributed.all_reduce(ctx.batch)

    def use(ctx: Any) -> None:
        ctx.total = ctx.batch.sum()

    tasks = [PipelineTask("reduce", reduce, pure=True), PipelineTask("use", use, pure=True)]
    with process_group(tmp_path):
        found = record(tasks, torch.ones(2), device="cpu")
    plan = found.plan()
    assert [e.globally_ordered for e in plan.schedule.values()] == [True, False]
    assert plan.tasks == tuple(tasks)
    assert (plan.deps, plan.cross_iter_deps, plan.depth) == ((("use", "reduce"),), (), 1)
    assert writes(found, "reduce") == {"ctx.batch"}
    assert any("'reduce' communicates" in note for note in found.notes)


class Simulator:
    """A simulator with state in Python, like gymnasium's environments, and a log file."""

    def __init__(self, path: Path) -> None:
        self.log = path.open("w+")
        self.state, self.draws = [0.0, 1.0], random.Random(3)

    def step(self, ctx: Any) -> None:
        """Move, draw, and write a line."""
        self.state[0] += self.state[1]
        self.state.append(self.draws.random())
        self.log.write(f"{self.state}\n")
        ctx.seen = list(self.state)

    def capture(self) -> Any:
        """Return everything that ``step`` changes."""
        self.log.flush()
        return self.state, self.draws.getstate(), self.log.tell()

    def restore(self, kept: Any) -> None:
        """Restore a captured state."""
        self.state, draws, end = kept
        self.draws.setstate(draws)
        self.log.seek(end)
        self.log.truncate()

    def io(self) -> DeclaredIO:
        """Return the declaration of the state."""
        return DeclaredIO(self.capture, self.restore, state="simulator")


@pytest.mark.parametrize("fails", [False, True])
def test_what_tasks_capture_is_restored(tmp_path: Path, fails: bool) -> None:
    """A simulator, a counter and a log file go on from where they were, also after a failure."""
    simulator, counts = Simulator(tmp_path / "log"), {"steps": 0}

    def count(ctx: Any) -> None:
        counts["steps"] += 1
        if fails and ctx.iter_idx:
            raise ValueError("mine")

    counting = DeclaredIO(lambda: dict(counts), counts.update, state="steps")
    tasks = [
        PipelineTask("step", simulator.step, io=[simulator.io()]),
        PipelineTask("count", count, io=[counting]),
    ]
    for task in tasks[: 2 - fails]:
        task.fn(SimpleNamespace(iter_idx=0))
    before = copy.deepcopy((simulator.capture(), counts))
    with pytest.raises(ValueError, match="mine") if fails else nullcontext():
        record(tasks, None, device="cpu")
    assert (simulator.capture(), counts) == before
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        with pytest.raises(ValueError, match="mine") if fails else nullcontext():
            profiler = TaskProfiler(pipe)
            profiler.profile_many([None, None], pipelined=True, num_rounds=2, num_measure=1)
    assert (simulator.capture(), counts) == before
    simulator.log.close()


def test_a_capture_that_fails_before_the_first_run_is_told() -> None:
    """An example is the capture of a handle, which the first run makes."""
    made: dict[str, int] = {}
    io = DeclaredIO(lambda: made["handle"], lambda kept: made.update(handle=kept), state="it")
    task = PipelineTask("make", lambda ctx: made.update(handle=1), io=[io])
    with pytest.warns(RuntimeWarning, match="'make': capture raised KeyError.*not restored"):
        record([task], None, device="cpu")
    assert made == {"handle": 1}


def test_a_step_on_a_worker_thread_is_guarded() -> None:
    """The run has its own threads: an optimizer that is not restored does not step there."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(ctx: Any) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    tasks = [PipelineTask("step", step), PipelineTask("rest", nothing)]
    plan = PipelinePlan(
        {"step": TaskSchedule(thread_group="io"), "rest": TaskSchedule()}, deps=[("rest", "step")]
    )
    before = copy.deepcopy(model.state_dict())
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        pipe.run([None, None])
        trained = copy.deepcopy(model.state_dict())
        saved = LoopState(tasks, nn.Linear(1, 1), pipe.device)
        with pytest.raises(UnsavedStateError, match="step of an optimizer"), saved.trial():
            pipe.run([None])
    assert all(map(torch.equal, trained.values(), model.state_dict().values()))
    assert not torch.equal(before["weight"], trained["weight"])


def test_tasks_of_which_nothing_is_declared_keep_their_order() -> None:
    """The notes say which could move if they were declared, and how to declare them."""
    model = nn.Linear(2, 1)

    def decode(ctx: Any) -> None:
        ctx.x = ctx.batch * 2

    def train(ctx: Any) -> None:
        with torch.no_grad():
            model.weight.add_(ctx.x)

    tasks = [PipelineTask(fn.__name__, fn) for fn in (decode, train)]
    found = record(tasks, torch.ones(1, 2), device="cpu")
    assert UNDECLARED in found.effects["decode"].reads & found.effects["train"].writes
    assert orders(found) == {("train", "decode", 0), ("decode", "train", 1)}
    (free,) = [note for note in found.notes if "pure=True" in note]
    assert free.startswith("The effects of 'decode' are not declared")
    (serial,) = [note for note in found.notes if "The effects of 'train' are not declared" in note]
    assert 'DeclaredIO(state="leaf (float32 [1, 2])", mode="rw")' in serial
    pure = record([replace(tasks[0], pure=True), tasks[1]], torch.ones(1, 2), device="cpu")
    assert orders(pure) == {("train", "decode", 0)}


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        (
            lambda model, ctx: torch.rand(2),
            "draws from .*default generators.*: declare random=True",
        ),
        (lambda model, ctx: random.random(), "draws from .*Python's default generator.*: take"),
        (lambda model, ctx: model[1].running_mean.add_(1), r"changes .*memory \(float32 \[2\]\)"),
        (lambda model, ctx: model(ctx.batch), "changes .*buffers"),
        (lambda model, ctx: model[0](ctx.batch), "reads .*parameters.*, which is trained"),
    ],
)
def test_what_a_pure_task_does_against_its_word(lie: Any, text: str) -> None:
    """It is in the notes and in the effects."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    task = PipelineTask("decode", partial(lie, model), pure=True)
    found = record([task], torch.ones(3, 2), device="cpu")
    (note,) = [
        one
        for one in found.notes
        if re.search(f"'decode' is declared pure=True, but .*{text}", one)
    ]
    assert "\n" not in note
    assert any(place.persistent for place in found.effects["decode"].reads)


def test_an_honest_pure_task_has_no_note() -> None:
    """The task evaluates a frozen model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False).eval()
    honest = record(
        [PipelineTask("decode", lambda ctx: model(ctx.batch), pure=True)], torch.ones(3, 2)
    )
    assert not [one for one in honest.notes if "says pure" in one]


def test_what_a_loader_may_touch() -> None:
    """It uses nothing if it is apart from the loop; otherwise all that is undeclared."""
    cases: list[tuple[Any, Effects]] = [([], Effects()), (iter([]), undeclared_effects())]
    for loader, effects in cases:
        found = record([PipelineTask("a", nothing)], None, device="cpu", loader=loader)
        assert next(iter(found.effects)) == PULL
        assert found.effects[PULL] == effects


def test_a_seeded_task_keeps_its_order_beside_one_that_draws_without() -> None:
    """While it runs, the generators have its states: the other would draw other numbers."""
    tasks = [
        PipelineTask("noise", lambda ctx: setattr(ctx, "x", torch.rand(2)), [WORD], random=True),
        PipelineTask("drop", lambda ctx: setattr(ctx, "y", torch.rand(2)), [WORD]),
    ]
    recording = record(tasks, None, device="cpu")
    assert ("drop", "noise") in recording.dependences().deps
    assert ("noise", "drop", 1) in recording.dependences().cross_iter_deps
    alone = record(tasks[:1], None, device="cpu")
    assert not any(place.persistent for place in alone.effects["noise"].writes)


def test_an_evaluation_keeps_its_order_with_whoever_runs_the_model() -> None:
    """It switches the mode and back: an overlapping forward would drop nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())

    def forward(ctx: Any) -> None:
        ctx.y = model(ctx.batch)

    def evaluate(ctx: Any) -> None:
        model.eval()
        ctx.score = model(ctx.batch).sum()
        model.train()

    def switch(ctx: Any) -> None:
        model.train(not model.training)

    found = recorded(forward, evaluate, batch=torch.ones(3, 4))
    assert {("evaluate", "forward", 0), ("forward", "evaluate", 1)} <= orders(found)
    assert "Sequential mode" in writes(found, "evaluate") & reads(found, "forward")
    assert "Sequential mode" in writes(recorded(forward, switch, batch=torch.ones(3, 4)), "switch")


def test_a_state_on_the_host_is_ordered_with_a_task_that_was_seen_to_change_it() -> None:
    """One task declares that it reads it by numpy; another one writes it without a declaration."""
    count = torch.zeros(1)
    array = count.numpy()
    tasks = [
        PipelineTask("count", lambda ctx: count.add_(1), io=[DeclaredIO(state="log")]),
        PipelineTask(
            "show",
            lambda ctx: setattr(ctx, "shown", float(array[0])),
            io=[DeclaredIO(state="count", mode="r", on_host=True)],
        ),
    ]
    plan = record(tasks, None, state={"count": count}, device="cpu").plan()
    assert plan.deps == (("show", "count"),)
    assert plan.cross_iter_deps == (("count", "show", 1),)


def test_a_state_that_a_task_was_seen_to_change_and_does_not_name_is_the_bodys_too() -> None:
    """A declared name does not make another state private: such a task once ran ahead."""
    weights = torch.zeros(1)
    tasks = [
        PipelineTask("a", lambda ctx: weights.add_(1), io=[DeclaredIO(state="log", others="")]),
        PipelineTask("b", lambda ctx: None, pure=True),
    ]
    ahead = PipelinePlan({"a": TaskSchedule(), "b": TaskSchedule(1)}, deps=[("b", "a")])

    def effects(of: list[PipelineTask]) -> dict[str, Effects]:
        return {**record(of, None, state={"w": weights}, device="cpu").effects}

    with pytest.raises(PlanError, match="'a' touches state 'w', which the loop's body may touch"):
        verify(ahead, tasks, effects(tasks), pull_ahead=True)
    apart = DeclaredIO(state="w", memory=weights, others="")
    named = [replace(tasks[0], io=[*tasks[0].io, apart]), tasks[1]]
    assert verify(ahead, named, effects(named), pull_ahead=True).undeclared == ()
