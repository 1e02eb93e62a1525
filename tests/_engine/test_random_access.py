"""Random draws do not depend on other pipelines: parallel, between, within or abandoned ones."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe._engine import randomness
from swpipe._engine.randomness import GeneratorAccess, TaskSeeds, lend_access
from swpipe._engine.waiting import Cancelled, ProgressCounter
from swpipe.device import CpuDevice
from tests.support.plans_for_tests import NOBODY_ELSE
from tests.support.sequencer import PATIENCE_S, await_event

ITERATIONS = 6


def await_that(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds, and fail if it takes too long."""
    for _ in range(int(PATIENCE_S / 1e-3)):
        if condition():
            return
        threading.Event().wait(1e-3)
    raise TimeoutError(f"{what} never came")


def somebody_waits() -> bool:
    """Return whether a block waits for access."""
    return len(randomness._queue) > 1


def ahead(depth: int = 3) -> PipelinePlan:
    """Return a plan of a random task "early" on a worker, ahead of a random task "late"."""
    return PipelinePlan(
        schedule={
            "early": TaskSchedule(stage=0, thread_group="io"),
            "late": TaskSchedule(stage=depth - 1),
        },
        deps=[("late", "early")],
    )


def drawing(name: str, within: Callable[[IterContext], object] | None = None) -> PipelineTask:
    """Return a random task that draws before and after it calls ``within``."""

    def draw(ctx: IterContext) -> None:
        before = torch.rand(20)
        if within is not None:
            within(ctx)
        setattr(ctx, name, torch.cat([before, torch.rand(20)]))

    return PipelineTask(name, draw, io=[NOBODY_ELSE], random=True)


def pipeline(
    seed: int,
    within: Callable[[IterContext], object] | None = None,
    early: Callable[[IterContext], object] | None = None,
    depth: int = 3,
    **options: Any,
) -> SWPipeline:
    """Return a pipeline of two random tasks, of which "late" calls ``within``."""
    mine = [drawing("early", early), drawing("late", within)]
    return SWPipeline(ahead(depth), mine, seed=seed, **options)


def draws(ctx: IterContext) -> list[float]:
    """Return the draws of both tasks."""
    return [*ctx.early.tolist(), *ctx.late.tolist()]


def serial(seed: int, count: int = ITERATIONS) -> list[list[float]]:
    """Return the draws of both tasks in a serial run."""
    with pipeline(seed) as pipe:
        return [draws(pipe.run_one_serial_iter(None)) for _ in range(count)]


class Lending:
    """A block that lends the thread's access, as each call of a pipeline does."""

    def __enter__(self) -> None:
        self._lent = lend_access()

    def __exit__(self, kind: Any, *failure: object) -> None:
        if self._lent is not None:
            self._lent.take_back(kind)


class Meeting:
    """Functions of random tasks that meet: each draws while another is about to draw."""

    def __init__(self) -> None:
        self._drawing: set[int] = set()

    def of(self, who: int) -> Callable[[IterContext], None]:
        """Return a function that, in iteration 0, waits until another task draws or waits too."""

        def meet(ctx: IterContext) -> None:
            if ctx.iter_idx == 0:
                self._drawing.add(who)
                await_that(lambda: len(self._drawing) > 1 or somebody_waits(), "the other one")

        return meet


@pytest.mark.parametrize("plan", ["pipelined", "serial"])
def test_two_pipelines_in_two_threads_draw_what_each_draws_alone(plan: str) -> None:
    """Exclusive access once belonged to a run, though the generators belong to the process."""
    found: dict[int, list[list[float]]] = {}
    meeting = Meeting()

    def drive(seed: int) -> None:
        with pipeline(seed, meeting.of(seed)) as pipe:
            contexts = (
                pipe.iterate(range(ITERATIONS))
                if plan == "pipelined"
                else map(pipe.run_one_serial_iter, range(ITERATIONS))
            )
            found[seed] = [draws(ctx) for ctx in contexts]

    threads = [threading.Thread(target=drive, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == {1: serial(1), 2: serial(2)}


def test_two_pipelines_in_turn_on_one_thread_draw_what_each_draws_alone() -> None:
    """The worker of one draws while the caller is in a task of the other."""
    meeting = Meeting()
    torch.manual_seed(3)
    untouched = torch.get_rng_state()
    with pipeline(1, early=meeting.of(1)) as one, pipeline(2, early=meeting.of(2)) as two:
        data = {pipe: iter(range(ITERATIONS)) for pipe in (one, two)}
        # Both pull before either waits for its worker.
        starts = threading.Thread(target=one.fill_pipeline, args=(data[one],))
        starts.start()
        two.fill_pipeline(data[two])
        starts.join(PATIENCE_S)
        found = [[draws(pipe.progress(data[pipe])) for pipe in (one, two)] for _ in range(6)]
    assert found == [list(pair) for pair in zip(serial(1), serial(2), strict=True)]
    assert torch.equal(torch.get_rng_state(), untouched)


@pytest.mark.parametrize("within", ["early", "late"])
def test_a_pipeline_driven_by_a_random_task_draws_what_it_draws_alone(within: str) -> None:
    """The task lends its access, and continues to draw where it stopped."""
    found: dict[int, list[float]] = {}
    inner_data = iter(range(2 * ITERATIONS))
    with pipeline(2) as inner:

        def drive(ctx: IterContext) -> None:
            for _ in range(2):
                done = inner.progress(inner_data)
                found[done.iter_idx] = draws(done)

        hooks = {"within" if within == "late" else "early": drive}
        with pipeline(1, **hooks) as outer:  # type: ignore[arg-type]
            outer_draws = [draws(ctx) for ctx in outer.iterate(range(ITERATIONS))]
    assert outer_draws == serial(1)
    assert [found[i] for i in range(2 * ITERATIONS)] == serial(2, 2 * ITERATIONS)


def test_batches_of_an_inner_pipeline_are_drawn_from_the_outer_task() -> None:
    """The draws are as if the task called the iterator itself: no number repeats."""

    def run(drive: Callable[[SWPipeline], Iterator[IterContext]], plan: str) -> list[Any]:
        found: list[tuple[int, list[float]]] = []
        plain = [PipelineTask("early", lambda _: None), PipelineTask("late", lambda _: None)]
        mine = [drawing("early"), drawing("late")] if plan == "random" else plain

        def inner(ctx: IterContext) -> None:
            with SWPipeline(ahead(), mine, seed=2) as pipe:
                batches = (torch.rand(2) for _ in range(4))
                found.extend((ctx.iter_idx, x.batch.tolist()) for x in pipe.iterate(batches))

        with pipeline(1, inner) as outer:
            ours = [draws(ctx) for ctx in drive(outer)]
        return [sorted(found), *ours]

    def pipelined(pipe: SWPipeline) -> Iterator[IterContext]:
        return pipe.iterate(range(ITERATIONS))

    def one_by_one(pipe: SWPipeline) -> Iterator[IterContext]:
        return map(pipe.run_one_serial_iter, range(ITERATIONS))

    torch.manual_seed(3)
    untouched = torch.get_rng_state()
    for plan in ("random", "plain"):
        ours = run(pipelined, plan)
        assert ours == run(one_by_one, plan)
        assert len({tuple(numbers) for _, numbers in ours[0]}) == 4 * ITERATIONS
        assert torch.equal(torch.get_rng_state(), untouched)


def test_a_pipeline_driven_by_the_iterator_draws_what_it_draws_alone() -> None:
    """A batch is pulled with access, too; the inner pipeline's worker runs ahead with it."""
    found: list[list[float]] = []

    def data() -> Iterator[torch.Tensor]:
        with pipeline(2) as inner:
            for ctx in inner.iterate(torch.rand(2) for _ in range(ITERATIONS)):
                found.append(draws(ctx))
                yield ctx.batch + torch.rand(2)

    def run(depth: int) -> list[Any]:
        torch.manual_seed(11)
        found.clear()
        with pipeline(1, depth=depth) as outer:
            ours = [(draws(ctx), ctx.batch.tolist()) for ctx in outer.iterate(data())]
        return [ours, list(found), torch.rand(3).tolist()]

    ours = run(depth=3)
    assert ours == run(depth=5) == run(depth=1)
    assert ([numbers for numbers, _ in ours[0]], ours[1]) == (serial(1), serial(2))


def test_a_loader_draws_what_it_draws_alone_beside_a_random_task() -> None:
    """Either the pull waits for the task, whose seed is the process's, or the task for the pull."""
    begun, drawn = set[int](), list[torch.Tensor]()

    def may_draw() -> bool:
        # Without access of its own it draws in the middle of the task, which waits for it below.
        return randomness._innermost() is not None or len(drawn) - 2 in begun

    def loader() -> Iterator[torch.Tensor]:
        for i in range(ITERATIONS):
            if i >= 2:
                await_that(may_draw, "the turn to draw")
            drawn.append(torch.rand(1))
            yield drawn[-1]

    def within(ctx: IterContext) -> None:
        begun.add(ctx.iter_idx)
        if ctx.iter_idx + 2 < ITERATIONS:
            await_that(lambda: len(drawn) > ctx.iter_idx + 2 or pull_waits(), "the pull")

    def pull_waits() -> bool:
        run = pipe._driver.run
        return run is not None and bool(run.iterations.generators.counter._waiters)

    plan = PipelinePlan(
        {"noise": TaskSchedule(thread_group="io"), "train": TaskSchedule(1)},
        deps=[("train", "noise")],
        pipeline_depth=3,
    )
    tasks = [drawing("noise", within), PipelineTask("train", lambda ctx: None, pure=True)]
    torch.manual_seed(0)
    alone = [torch.rand(1) for _ in range(ITERATIONS)]
    torch.manual_seed(0)
    with SWPipeline(plan, tasks, device="cpu", seed=1) as pipe:
        assert pipe.run(loader()).iterations == ITERATIONS
    assert torch.equal(torch.cat(drawn), torch.cat(alone))


def test_an_inner_worker_may_have_access_when_the_outer_takes_its_own_back() -> None:
    """The outer task waits for it: the worker restores the process's states."""
    found: list[list[float]] = []
    ahead_by_two = threading.Event()

    def await_the_outer(ctx: IterContext) -> None:
        if ctx.iter_idx == 2:  # pulled by the first call
            ahead_by_two.set()
            await_that(somebody_waits, "the outer pipeline")

    def late(_: IterContext) -> None:
        await_event(ahead_by_two, "the worker")

    mine = [drawing("early", await_the_outer), PipelineTask("late", late)]
    with SWPipeline(ahead(), mine, seed=2) as inner:
        inner_data = iter(range(ITERATIONS))

        def drive(_: IterContext) -> None:
            found.append(inner.progress(inner_data).early.tolist())

        with pipeline(1, drive) as outer:
            ours = [draws(ctx) for ctx in outer.iterate(range(ITERATIONS))]
    assert ours == serial(1)
    assert found == [numbers[:40] for numbers in serial(2)]


# ------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize("at_the_end_of_data", [False, True])
def test_a_task_whose_run_fails_during_an_inner_call_ends_there(at_the_end_of_data: bool) -> None:
    """It neither waits for access nor draws from the process's generators."""
    inside = threading.Event()
    ends: list[BaseException] = []

    def early(_: IterContext) -> None:
        mine = randomness.this_thread.access
        assert mine is not None
        try:
            with suppress(StopIteration), Lending():
                inside.set()
                await_that(lambda: mine.run.cancelled, "the failure")
                if at_the_end_of_data:
                    raise StopIteration
        except BaseException as error:
            ends.append(error)
            raise

    def fail(_: IterContext) -> None:
        await_event(inside, "the other task")
        raise ArithmeticError

    plan = PipelinePlan(
        schedule={"early": TaskSchedule(thread_group="io"), "fail": TaskSchedule()}, deps=[]
    )
    mine = [PipelineTask("early", early, io=[NOBODY_ELSE], random=True), PipelineTask("fail", fail)]
    torch.manual_seed(5)
    untouched = torch.get_rng_state()
    with SWPipeline(plan, mine, seed=1) as pipe:
        with pytest.raises(ArithmeticError):
            pipe.progress(iter(range(3)))
    assert [type(error) for error in ends] == [Cancelled]
    assert torch.equal(torch.get_rng_state(), untouched)


@pytest.mark.parametrize("ending", ["released", "cancelled"])
def test_who_waits_for_another_pipelines_access_wakes_at_once(
    monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """It wakes when access is given back or its own run fails, not at the next look."""
    monkeypatch.setattr(randomness, "WAKE_S", 3 * PATIENCE_S)
    ends: list[str] = []
    mine = one_access()

    def wait() -> None:
        try:
            with mine.seeded("a", 0):
                ends.append("released")
        except Cancelled:
            ends.append("cancelled")

    waiter = threading.Thread(target=wait, daemon=True)
    with one_access().exclusive():
        waiter.start()
        await_that(somebody_waits, "the other thread")
        if ending == "cancelled":
            mine.cancel()
            waiter.join(PATIENCE_S)
    waiter.join(PATIENCE_S)
    assert ends == [ending]


# ---------------------------------------------------------------------- interrupts, signals, forks


def one_access() -> GeneratorAccess:
    """Return the access of a run."""
    return GeneratorAccess(TaskSeeds(7, CpuDevice()), ProgressCounter())


def test_an_interrupt_right_after_seeding_loses_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller of the seeding function saves the states after seeding."""
    seed = CpuDevice.seed_generators

    def interrupted(device: CpuDevice, number: int) -> None:
        seed(device, number)
        raise KeyboardInterrupt

    monkeypatch.setattr(CpuDevice, "seed_generators", interrupted)
    torch.manual_seed(5)
    untouched = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt), one_access().seeded("a", 0):
        pass
    assert torch.equal(torch.get_rng_state(), untouched)
    assert not randomness._queue


def interrupt_at(place: int, act: Callable[[], None]) -> bool:
    """Raise KeyboardInterrupt at the n-th instruction in the module; return whether it exists."""
    left = place

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != randomness.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("lent", [False, True], ids=["drawing", "lent"])
@pytest.mark.parametrize("ended", [False, True], ids=["serially", "in a run"])
def test_an_interrupt_at_any_place_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, ended: bool, lent: bool
) -> None:
    """A run's end gives back what it holds; others find a serial iteration's block free."""
    monkeypatch.setattr(randomness, "WAKE_S", 1e-3)

    def pull() -> None:
        with one_access().exclusive():
            torch.rand(3)

    def act() -> None:
        with access.seeded("a", 0):
            torch.rand(3)
            if lent:
                with Lending():
                    pull()
                torch.rand(3)

    torch.manual_seed(5)
    untouched = torch.get_rng_state()
    place, access = 1, one_access()
    while interrupt_at(place, act):
        if ended:
            access.end()
            assert torch.equal(torch.get_rng_state(), untouched), place
        with one_access().seeded("b", 0):
            drawn = torch.rand(3)
        with one_access().exclusive():
            assert torch.equal(torch.get_rng_state(), untouched), place
        assert not randomness._queue, place
        assert torch.equal(torch.get_rng_state(), untouched), place
        place, access = place + 1, one_access()
    with one_access().seeded("b", 0):
        assert torch.equal(torch.rand(3), drawn)
    assert place > 100


def test_cancelling_takes_no_lock() -> None:
    """A signal handler may cancel on the thread that has the lock, or while another has it."""
    access = one_access()
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with access.lock:
            taken.set()
            await_event(release, "the end of the test")

    holder = threading.Thread(target=hold)
    holder.start()
    await_event(taken, "the other thread")
    canceller = threading.Thread(target=access.cancel)
    canceller.start()
    canceller.join(PATIENCE_S)
    waits = canceller.is_alive()
    release.set()
    holder.join(PATIENCE_S)
    assert not waits


def test_a_child_process_waits_for_no_thread_of_its_parent() -> None:
    """The parent's thread may be a worker that drew when the process was forked."""
    drawing_now, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with one_access().seeded("a", 0):
            drawing_now.set()
            await_event(forked, "the fork")

    holder = threading.Thread(target=hold)
    holder.start()
    await_event(drawing_now, "the other thread")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks while there are threads
        child = os.fork()
    if not child:
        os._exit(len(randomness._queue))
    forked.set()
    holder.join(PATIENCE_S)
    assert os.waitpid(child, 0)[1] == 0
