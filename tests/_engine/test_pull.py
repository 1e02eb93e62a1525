"""A thread group that pulls the batches, with the guarantees of a pull on the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe._engine.run import Run
from swpipe.core.costs import CostModel, TaskCost
from swpipe.pipeline import settle
from swpipe.planning.simulation.simulator import simulate
from tests.support.sequencer import await_event


def double(ctx: IterContext) -> None:
    """Set ``y`` to twice the batch."""
    ctx.y = 2 * ctx.batch


def add(ctx: IterContext) -> None:
    """Add one."""
    ctx.z = ctx.y + 1


TASKS = [PipelineTask("double", double), PipelineTask("add", add)]
PLAN = PipelinePlan(
    {"double": TaskSchedule(), "add": TaskSchedule(1)},
    deps=[("add", "double")],
    pull_group="loader",
)

LAST = replace(PipelinePlan.serial(TASKS), pull_group="loader", pipeline_depth=None)
"""A plan whose caller's thread first uses a batch in the call that hands its iteration out."""


class Loader:
    """An iterator that notes the threads that pull, and whether the caller is in a call."""

    def __init__(self, size: int, fails_at: int | None = None) -> None:
        self.size, self.fails_at = size, fails_at
        self.pulled = 0
        self.threads: set[str] = set()
        self.in_call = False
        self.outside = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.threads.add(threading.current_thread().name)
        self.outside += not self.in_call
        if self.pulled == self.fails_at:
            raise OSError("planted")
        if self.pulled == self.size:
            raise StopIteration
        self.pulled += 1
        return self.pulled - 1


def meeting(meet: threading.Barrier) -> Iterator[int]:
    """Yield six batches; from the third on, first meet a thread that works on an earlier one."""
    for i in range(6):
        if i >= 2:
            meet.wait()
        yield i


@pytest.fixture
def pipe() -> Iterator[SWPipeline]:
    with SWPipeline(PLAN, TASKS, device="cpu") as made:
        yield made


def test_every_batch_is_pulled_once_and_in_order(pipe: SWPipeline) -> None:
    """The iterator is called on a separate thread; the pipeline can be used again."""
    for _ in range(2):
        loader = Loader(7)
        assert [ctx.z for ctx in pipe.iterate(loader)] == [2 * i + 1 for i in range(7)]
        assert loader.pulled == 7
        assert loader.threads == {"swpipe-loader"}
    assert pipe.next_iteration == 14


@pytest.mark.parametrize("depth", [3, 6])
def test_the_loader_is_called_between_two_calls(depth: int) -> None:
    """It is called for all iterations in flight, and no further."""
    loader = Loader(9)
    with SWPipeline(replace(PLAN, pipeline_depth=depth), TASKS, device="cpu") as pipe:
        for number in range(9):
            assert pipe.progress(loader).iter_idx == number
            settle(pipe)
            assert loader.pulled == min(number + depth, 9)
            assert pipe.in_flight == loader.pulled - number - 1


def test_an_end_of_the_data_that_is_found_between_two_calls_ends_the_threads() -> None:
    """The threads end when the caller asks the next time."""
    before = threading.active_count()
    with SWPipeline(LAST, TASKS, device="cpu") as pipe:
        loader = Loader(2)
        assert [pipe.progress(loader).iter_idx for _ in range(2)] == [0, 1]
        settle(pipe)
        with pytest.raises(StopIteration):
            pipe.progress(loader)
        assert threading.active_count() == before


@pytest.mark.parametrize("pull", ["loader", "io"])
def test_the_body_and_the_loader_wait_for_each_other(pull: str) -> None:
    """They can continue only if they overlap."""
    meet = threading.Barrier(2, timeout=30)

    tasks = [PipelineTask("double", double, pure=True), TASKS[1]]
    schedule = {"double": TaskSchedule(thread_group="io"), "add": TaskSchedule(1)}
    plan = replace(PLAN, schedule=schedule, pull_group=pull)
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        for ctx in pipe.iterate(meeting(meet)):
            if ctx.iter_idx < 4:
                meet.wait()


def test_the_loader_is_waited_for_where_a_task_of_its_group_waits_for_the_caller() -> None:
    """The result of the pull is known before that task has run."""
    tasks = [PipelineTask("double", double), PipelineTask("add", add)]
    plan = PipelinePlan(
        {"double": TaskSchedule(thread_group="io"), "add": TaskSchedule()},
        deps=[("add", "double")],
        cross_iter_deps=[("double", "add")],
        pull_group="io",
        pipeline_depth=3,
    )
    loader = Loader(5)
    with SWPipeline(plan, tasks, device="cpu", stall_timeout_s=60) as pipe:
        pipe.progress(loader)
        settle(pipe)
        assert loader.pulled >= 2
        assert [ctx.z for ctx in pipe.iterate(loader)] == [3, 5, 7, 9]


def test_the_loader_is_waited_for_and_not_the_task_after_it() -> None:
    """That task may wait for the loop's body, which waits for the loader."""
    released = threading.Event()

    def slow(ctx: IterContext) -> None:
        if ctx.batch == 1:
            await_event(released, "the body")
        double(ctx)

    tasks = [PipelineTask("double", slow), PipelineTask("add", add)]
    schedule = {"double": TaskSchedule(thread_group="io"), "add": TaskSchedule(1)}
    plan = PipelinePlan(schedule, deps=[("add", "double")], pull_group="io")
    loader = Loader(5)
    with SWPipeline(plan, tasks, device="cpu", stall_timeout_s=None) as pipe:
        assert pipe.progress(loader).z == 1
        settle(pipe)
        assert loader.pulled == 3
        released.set()
        assert [ctx.z for ctx in pipe.iterate(loader)] == [3, 5, 7, 9]


def test_another_iterator_may_follow_at_once() -> None:
    """It does not matter whether the end of the previous iterator has been found."""
    goes_on = threading.Event()

    def batches() -> Iterator[int]:
        yield from range(3)
        assert goes_on.wait(30)

    first = batches()
    with SWPipeline(LAST, TASKS, device="cpu") as pipe:
        for _ in range(3):
            pipe.progress(first)
        threading.Timer(0.2, goes_on.set).start()
        assert [ctx.z for ctx in pipe.iterate(Loader(2))] == [1, 3]


@pytest.mark.parametrize("depth", [None, 6])
def test_within_calls_the_loader_is_called_only_during_a_call(depth: int | None) -> None:
    """Therefore the caller's code between two calls never overlaps with it."""
    loader = Loader(9)
    plan = replace(PLAN, pipeline_depth=depth, within_calls=True)
    with SWPipeline(plan, TASKS, device="cpu") as pipe:
        while True:
            loader.in_call = True
            try:
                pipe.progress(loader)
            except StopIteration:
                break
            loader.in_call = False
            pulled = loader.pulled
            threading.Event().wait(2e-3)  # time for a thread that would go on by itself
            assert loader.pulled == pulled
    assert loader.pulled == 9
    assert loader.outside == 0


def test_an_error_of_the_loader_comes_out_as_itself(pipe: SWPipeline) -> None:
    """It has a note, and is raised when all earlier iterations are returned."""
    found: list[int] = []
    with pytest.raises(OSError, match="planted") as caught:
        found.extend(ctx.z for ctx in pipe.iterate(Loader(9, fails_at=4)))
    assert any("pulling the batch of iteration 4" in note for note in caught.value.__notes__)
    assert found == [1, 3, 5, 7]
    assert [ctx.z for ctx in pipe.iterate(Loader(2))] == [1, 3]


def test_filling_waits_for_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a pull that ends only when the caller waits for it."""
    waits, done, settle = threading.Event(), threading.Event(), Run.settle

    def waiting(run: Run) -> None:
        waits.set()
        settle(run)

    def batches() -> Iterator[int]:
        yield from range(PLAN.depth - 2)
        while not (waits.is_set() or done.is_set()):
            waits.wait(1e-3)
        pulled.append(PLAN.depth - 2)
        yield from range(PLAN.depth - 2, 9)

    pulled: list[int] = []
    monkeypatch.setattr(Run, "settle", waiting)
    with SWPipeline(PLAN, TASKS, device="cpu") as pipe:
        pipe.fill_pipeline(batches())
        found = len(pulled)
        done.set()
        assert found == 1
        pipe.drain()


def test_pushed_batches_are_taken_at_once(pipe: SWPipeline) -> None:
    """The caller has no pushed batch ahead."""
    handed_out = [pipe.push(i) for i in range(5)]
    assert handed_out[:2] == [None, None]
    rest = pipe.flush()
    assert [ctx.z for ctx in (*handed_out[2:], *rest) if ctx] == [1, 3, 5, 7, 9]


def test_the_callers_settings_hold_for_the_loader(pipe: SWPipeline) -> None:
    """An example is no_grad, which holds on the other thread."""

    def batches() -> Iterator[bool]:
        for _ in range(3):
            yield torch.is_grad_enabled()

    with torch.no_grad():
        assert [ctx.batch for ctx in pipe.iterate(batches())] == [False] * 3


def test_a_simulation_knows_what_the_pull_takes() -> None:
    """The pull is hidden by the tasks, or adds to them."""
    costs = CostModel({"double": TaskCost(5), "add": TaskCost(5), "<pull>": TaskCost(10)})
    hidden = simulate(PLAN, costs, streams=False).ii_us
    assert hidden == pytest.approx(10, abs=1)
    assert simulate(replace(PLAN, pull_group=None), costs, streams=False).ii_us == pytest.approx(20)


def test_draining_loses_nothing_if_the_data_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull in progress finds the end; ``drain`` once raised StopIteration, and lost batches."""
    advance, asked, ended = Run.advance, threading.Event(), threading.Event()

    def advance_late(run: Run) -> Any:
        if run.draining and run.retired == 2:
            ended.set()
        return advance(run)

    def data() -> Iterator[int]:
        yield from range(2)
        asked.set()
        await_event(ended, "the last call of a drain")

    source = data()
    with SWPipeline(replace(LAST, pipeline_depth=3), TASKS, device="cpu") as pipe:
        assert pipe.progress(source).batch == 0
        await_event(asked, "a pull after the last batch")
        monkeypatch.setattr(Run, "advance", advance_late)
        assert [ctx.batch for ctx in pipe.drain()] == [1]
        assert pipe.in_flight == 0
