"""Tasks with ``random=True`` get the same random numbers under every plan."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe._engine.randomness import GeneratorAccess, TaskSeeds
from swpipe._engine.waiting import Cancelled, ProgressCounter
from swpipe.device import CpuDevice
from swpipe.errors import StallError
from tests.support.cpu_on import CpuOn
from tests.support.hang import Hang, has_come_to
from tests.support.plans_for_tests import NAMES, NOBODY_ELSE, piped, spread, task, tasks
from tests.support.sequencer import PATIENCE_S, await_event

PLANS = {"four groups": spread(), "deep": piped(depth=6)}


def drawing(name: str) -> PipelineTask:
    """Return a task that draws several times, so that concurrent draws would mix."""

    def draw(ctx: IterContext) -> None:
        setattr(ctx, name, torch.cat([torch.rand(50) for _ in range(5)]))

    return PipelineTask(name, draw, io=[NOBODY_ELSE], random=True)


def draws(plan: PipelinePlan, seed: int | None = 7) -> list[torch.Tensor]:
    """Return all random numbers of six iterations under a plan."""
    with SWPipeline(plan, [drawing(name) for name in NAMES], seed=seed) as pipe:
        found = []
        for ctx in pipe.iterate(range(6)):
            found += [getattr(ctx, name) for name in NAMES]
    return found


def serial_draws() -> list[torch.Tensor]:
    """Return all random numbers of six serial iterations."""
    with SWPipeline(piped(), [drawing(name) for name in NAMES], seed=7) as pipe:
        contexts = [pipe.run_one_serial_iter(batch, batch) for batch in range(6)]
    return [getattr(ctx, name) for ctx in contexts for name in NAMES]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Return whether two lists of tensors are equal bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_draws_do_not_depend_on_the_plan(plan: PipelinePlan) -> None:
    """Threads and overlap change nothing."""
    assert same(draws(plan), serial_draws())


def test_serial_iterations_one_by_one_draw_what_the_plan_draws() -> None:
    """Without a number, each is the pipeline's next: no random number comes twice."""
    with SWPipeline(piped(), [drawing(name) for name in NAMES], seed=7) as pipe:
        contexts = [pipe.run_one_serial_iter(batch) for batch in range(6)]
    ours = [getattr(ctx, name) for ctx in contexts for name in NAMES]
    assert same(ours, draws(piped()))
    assert len({tuple(d.tolist()) for d in ours}) == len(ours)
    assert not same(ours, draws(piped(), seed=8))


def test_without_a_seed_torchs_own_initial_seed_serves() -> None:
    """Therefore ``torch.manual_seed`` makes runs repeatable."""
    torch.manual_seed(3)
    once = draws(piped(), seed=None)
    torch.manual_seed(3)
    assert same(once, draws(spread(), seed=None))


def test_the_callers_own_draws_do_not_depend_on_the_plan() -> None:
    """The generators are restored after each task."""

    def callers(run: Callable[[], object]) -> torch.Tensor:
        torch.manual_seed(5)
        run()
        return torch.rand(4)

    assert torch.equal(callers(lambda: draws(piped())), callers(serial_draws))
    assert torch.equal(callers(serial_draws), callers(lambda: None))


def test_the_generators_are_restored_when_a_task_fails() -> None:
    """They are restored after a failure as after a success."""
    torch.manual_seed(1)
    expected = torch.rand(3)

    def fail(_: IterContext) -> None:
        torch.rand(100)
        raise ArithmeticError

    torch.manual_seed(1)
    task = PipelineTask("a", fail, io=[NOBODY_ELSE], random=True)
    with SWPipeline(PipelinePlan.serial([task]), [task]) as pipe:
        with pytest.raises(ArithmeticError):
            pipe.run_one_serial_iter(0)
    assert torch.equal(torch.rand(3), expected)


# ------------------------------------------------------------------------------- tasks that hang


def hangs_once(place: Hang) -> PipelineTask:
    """Return a task that draws, but in its first run only waits to be released."""

    def draw(ctx: IterContext) -> None:
        if place.inside.is_set():
            ctx.h2d = torch.rand(3)
        else:
            place.hang()

    return PipelineTask("h2d", draw, io=[NOBODY_ELSE], random=True)


def drawn_from(seed: int) -> torch.Tensor:
    """Seed torch, and draw."""
    torch.manual_seed(seed)
    return torch.rand(3)


def test_a_task_still_running_neither_delays_the_next_run_nor_changes_its_generators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its access belongs to the failed run, which has restored the generators."""
    place = Hang(monkeypatch)
    mine = [hangs_once(place), *tasks()[1:]]
    before, after = drawn_from(5), drawn_from(6)
    with SWPipeline(piped(), mine, seed=7, stall_timeout_s=0.1, device=CpuOn(place)) as pipe:
        torch.manual_seed(5)
        with pytest.raises(StallError):
            pipe.run(range(9))
        place.noticed = lambda: False  # what hangs now is no longer of any run
        assert torch.equal(torch.rand(3), before)
        left = next(t for t in threading.enumerate() if t.name == "swpipe-io")
        ours = [(ctx.iter_idx, ctx.h2d) for ctx in pipe.iterate(range(4))]
        assert all(torch.equal(x, pipe.run_one_serial_iter(0, i).h2d) for i, x in ours)
        torch.manual_seed(6)
        place.release.set()
        left.join(PATIENCE_S)
    assert torch.equal(torch.rand(3), after)


def test_no_access_is_given_once_the_run_has_ended() -> None:
    """A delayed thread does not seed the next run's generators."""
    generators = GeneratorAccess(TaskSeeds(7, CpuDevice()), ProgressCounter())
    generators.end()
    torch.manual_seed(5)
    with pytest.raises(Cancelled), generators.seeded("h2d", 0):
        pass
    assert torch.initial_seed() == 5


def test_who_waits_for_access_wakes_when_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the task that hangs keeps running; its access once kept others waiting, too."""
    place = Hang(monkeypatch, noticed=lambda: has_come_to(pipe, "b", "waits", 0))
    plan = PipelinePlan(
        schedule={
            "h2d": TaskSchedule(thread_group="a"),
            "gate": TaskSchedule(thread_group="b"),
            "waits": TaskSchedule(thread_group="b"),
        },
        deps=[("waits", "gate")],
    )
    mine = [
        hangs_once(place),
        task("gate", lambda _: await_event(place.inside, "the other task")),
        task("waits", io=[NOBODY_ELSE], random=True),
    ]
    with SWPipeline(plan, mine, stall_timeout_s=0.1, device=CpuOn(place)) as pipe:
        with pytest.raises(StallError) as caught:
            pipe.run(range(3))
        place.release.set()
    told = (
        "inside task 'waits' of iteration 0, or waiting for access to the random number generators"
    )
    assert told in str(caught.value)
    left = "thread group 'a' is still inside task 'h2d' of iteration 0"
    assert caught.value.__notes__ == [f"swpipe: {left}; its thread ends when that returns"]


def test_a_stall_reaches_a_caller_on_another_thread_that_waits_for_access_to_pull(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No signal reaches the caller there, and it sleeps on a lock: it has to be woken."""
    place = Hang(monkeypatch)
    caught: list[BaseException] = []

    def drive() -> None:
        mine = [hangs_once(place), *tasks()[1:]]
        with SWPipeline(piped(), mine, stall_timeout_s=0.1, device=CpuOn(place)) as pipe:
            try:
                pipe.run(range(9))
            except StallError as error:
                caught.append(error)

    caller = threading.Thread(target=drive)
    caller.start()
    caller.join(PATIENCE_S)
    place.release.set()
    caller.join(PATIENCE_S)
    assert "inside task 'h2d' of iteration 0" in str(caught[0])
