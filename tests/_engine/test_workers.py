"""Groups of several workers: what runs at once, the order of results, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from swpipe import DeclaredIO, IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.verification import verify_for_run
from swpipe.core.resolved import resolve_plan
from swpipe.errors import PlanError
from tests.support.sequencer import PATIENCE_S, await_event, swpipe_threads

WORKERS = 3


class Planted(Exception):
    """An error that a test raises on purpose."""


def plan(workers: int = WORKERS, **more: Any) -> PipelinePlan:
    """Return a plan that reads on several workers, and trains on the caller's thread."""
    return PipelinePlan(
        {
            "read": TaskSchedule(0, thread_group="io", workers=workers),
            "train": TaskSchedule(1),
        },
        **{"deps": [("train", "read")], "cross_iter_deps": [("train", "train")], **more},
    )


def pipe(
    read: Callable[[IterContext], object], given: PipelinePlan | None = None, **options: Any
) -> SWPipeline[Any]:
    """Return a pipeline of a pure task that reads, and a task that uses the result."""

    def run(ctx: IterContext) -> None:
        ctx.x = read(ctx)

    def train(ctx: IterContext) -> None:
        ctx.y = ctx.x

    tasks = [PipelineTask("read", run, pure=True, **options), PipelineTask("train", train)]
    return SWPipeline(given or plan(), tasks, device="cpu", seed=5)


def test_as_many_iterations_as_workers_are_read_at_once_and_come_out_in_order() -> None:
    """Each worker waits until all others have reached the task, too."""
    together = threading.Barrier(WORKERS)

    def read(ctx: IterContext) -> object:
        together.wait(PATIENCE_S)
        return ctx.batch

    with pipe(read) as running:
        assert [ctx.y for ctx in running.iterate(range(3 * WORKERS))] == [*range(3 * WORKERS)]
    assert not swpipe_threads()


def test_iteration_i_is_the_work_of_worker_i_modulo_their_number() -> None:
    """The number of the iteration counts, also if a run does not begin with the first."""

    def read(ctx: IterContext) -> object:
        return threading.current_thread().name

    with pipe(read) as running:
        for count in (5, 4):
            for ctx in running.iterate(range(count)):
                assert ctx.y == f"swpipe-io {ctx.iter_idx % WORKERS}"


def test_the_first_failure_in_the_order_of_iterations_is_the_one_that_comes_out() -> None:
    """It is that of iteration 3, which fails after iteration 4."""
    failed = threading.Event()

    def read(ctx: IterContext) -> object:
        if ctx.batch == 4:
            failed.set()
            raise Planted("4")
        if ctx.batch == 3:
            await_event(failed, "a failure")
            raise Planted("3")
        return ctx.batch

    with pipe(read) as running:
        with pytest.raises(Planted, match="3") as caught:
            running.run(range(9))
        assert caught.value.__notes__ == ["swpipe: at task 'read', iteration 3, thread group 'io'"]
        assert running.run([7, 8]).iterations == 2


def test_a_failure_waits_until_the_iterations_before_have_passed() -> None:
    """Iteration 4 fails while iteration 3 is read; iteration 3 then succeeds and is returned."""
    failed, found = threading.Event(), list[int]()
    third_is_out = threading.Event()

    def read(ctx: IterContext) -> object:
        if ctx.batch == 4:
            await_event(third_is_out, "iteration 2, which the caller may be late with")
            failed.set()
            raise Planted("4")
        if ctx.batch == 3:
            await_event(failed, "a failure")
        return ctx.batch

    def run(running: SWPipeline[Any]) -> None:
        contexts = running.iterate(range(9))
        found.extend(next(contexts).y for _ in range(3))
        third_is_out.set()
        found.extend(ctx.y for ctx in contexts)

    with pipe(read) as running, pytest.raises(Planted, match="4"):
        run(running)
    assert found[:3] == [0, 1, 2]


def test_a_failure_elsewhere_ends_the_wait_for_iterations_before() -> None:
    """The caller is interrupted while one worker has failed and another does not return."""
    failed, released = threading.Event(), threading.Event()

    def read(ctx: IterContext) -> object:
        if ctx.batch == 1:
            failed.set()
            raise Planted("1")
        if ctx.batch == 0:
            await_event(released, "the end")
        return ctx.batch

    def batches() -> Any:
        yield from (0, 1)
        await_event(failed, "a failure")
        raise KeyboardInterrupt

    with pipe(read) as running:
        with pytest.raises(KeyboardInterrupt):
            running.run(batches())
        released.set()
    assert not [t for t in swpipe_threads() if not t.join(PATIENCE_S) and t.is_alive()]


def test_a_task_after_the_workers_can_have_its_own_order() -> None:
    """The tasks read at once, and note one after the other, on the threads of the workers."""
    order, together = list[int](), threading.Barrier(WORKERS)

    def read(ctx: IterContext) -> None:
        together.wait(PATIENCE_S)

    def note(ctx: IterContext) -> None:
        order.append(ctx.batch)

    log = DeclaredIO(state="log", mode="rw", others="")
    tasks = [
        PipelineTask("read", read, pure=True),
        PipelineTask("note", note, io=[log]),
        PipelineTask("train", lambda ctx: None),
    ]
    entry = TaskSchedule(0, thread_group="io", workers=WORKERS)
    schedule = {"read": entry, "note": entry, "train": TaskSchedule(1)}
    deps = [("note", "read"), ("train", "note")]
    with pytest.raises(PlanError, match="its 3 workers run it on several iterations at once"):
        SWPipeline(PipelinePlan(schedule, deps), tasks)
    in_turn = PipelinePlan(schedule, deps, cross_iter_deps=[("note", "note")])
    with SWPipeline(in_turn, tasks, device="cpu") as running:
        running.run(range(9))
    assert order == [*range(9)]


def test_states_that_are_used_in_turn_allow_as_many_workers() -> None:
    """Distance 3 allows 3 workers without a wait, and makes 4 take turns."""
    for workers, waits in ((3, 0), (4, 1)):
        far = plan(workers, cross_iter_deps=[("read", "read", 3)])
        with pipe(lambda ctx: ctx.batch, far) as running:
            assert running.format_program().count("wait(io.read, lag 3)") == waits


def test_an_event_is_kept_until_its_worker_asks_for_it() -> None:
    """An overwritten value waits for its device work until the worker's next iteration."""
    tasks = [
        PipelineTask("read", lambda ctx: None, pure=True, reads=["batch"]),
        PipelineTask("train", lambda ctx: None),
    ]
    on_streams = replace(plan(), schedule={**plan().schedule, "train": TaskSchedule(1, "side")})
    for keep, more in ((None, 0), (["y"], WORKERS)):
        kept = replace(on_streams, keep=keep)
        found = verify_for_run(kept, tasks, None, device="cuda", streams=True)
        assert found.program.ring == found.plan.depth + 1 + more


def test_replays_of_one_task_take_turns() -> None:
    """The first iteration is cached, also if several workers reach the task at once."""
    called = list[int]()

    def read(ctx: IterContext) -> object:
        called.append(ctx.batch)
        return torch.ones(2)

    for _ in range(5):
        with pipe(read) as running, running.shortcut("read"):
            assert all(ctx.y.sum() == 2 for ctx in running.iterate(range(6)))
    assert called == [0] * 5


@pytest.mark.parametrize("distances", [(2, 4), (0, 1, 5)])
@pytest.mark.parametrize("groups", [("io", "io"), ("io", "net")])
def test_each_dependence_is_kept_at_its_own_distance(
    groups: tuple[str, str], distances: tuple[int, ...]
) -> None:
    """The previous iteration is another worker's: a task after it need not come after this one."""
    schedule = {
        name: TaskSchedule(0, thread_group=group, workers=WORKERS)
        for name, group in zip("ab", groups, strict=True)
    }
    across = [("b", "a", distance) for distance in distances if distance]
    deps = [("b", "a")] if 0 in distances else []
    before = HappensBefore.of(resolve_plan(PipelinePlan(schedule, deps, across)), streams=False)
    kept = {n for n in range(6) if before.host("a", "b", n)}
    assert kept >= {*distances}
    # Of one iteration they run on one thread; what is the depth apart is in order anyhow.
    assert {n for n in kept if n < WORKERS} == {n for n in distances if n < WORKERS} | (
        {0} if groups[0] == groups[1] else set()
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"read": TaskSchedule(0, thread_group="io", workers=0)}, "workers is 0; give the number"),
        ({"read": TaskSchedule(0, workers=2)}, "is the thread of the caller, which is one"),
        (
            {"more": TaskSchedule(0, thread_group="io")},
            "has 3 workers, and not in all of its tasks",
        ),
        (
            {"more": TaskSchedule(1, thread_group="io", workers=3)},
            "has 3 workers, and tasks in stages 0, 1",
        ),
    ],
)
def test_a_plan_that_gives_a_group_no_workers_is_refused(
    changes: dict[str, TaskSchedule], text: str
) -> None:
    """It is refused by an error before anything runs."""
    schedule = {**plan().schedule, **changes}
    tasks = [PipelineTask(name, lambda ctx: None, pure=True) for name in schedule]
    with pytest.raises(PlanError, match=text):
        SWPipeline(PipelinePlan(schedule), tasks)


def test_the_depth_grows_by_the_workers() -> None:
    """Otherwise the workers would have nothing to do."""
    assert plan(1).depth == 2
    assert plan(4).depth == 5
    assert plan(4, pull_group="loader").depth == 6
    with pytest.raises(PlanError, match="3 workers need 4 iterations in flight: set it to 4"):
        pipe(lambda ctx: None, plan(pipeline_depth=3))
    with pytest.raises(PlanError, match="is the thread of the loader's calls, which is one"):
        pipe(lambda ctx: None, plan(pull_group="io"))


def test_a_task_that_says_nothing_is_not_run_beside_itself() -> None:
    """The plan may say how many iterations apart they keep their order."""
    tasks = [PipelineTask("read", lambda ctx: None), PipelineTask("train", lambda ctx: None)]
    with pytest.raises(PlanError, match="the effects of task 'read' are not declared, and its 3"):
        SWPipeline(plan(), tasks)
    SWPipeline(plan(cross_iter_deps=[("read", "read", 3)]), tasks).close()


def test_a_plan_with_workers_is_drawn() -> None:
    """The drawing has the number of workers."""
    with pipe(lambda ctx: None) as running:
        assert "read [io x 3]     0   1" in running.format_schedule(3)
        assert "\nio x 3: " in running.format_program()
