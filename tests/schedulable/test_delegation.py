"""A user-defined executor, as in the seed's section 9.3."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from swpipe.schedulable import (
    SchedulablePipeline,
    Schedule,
    ScheduleValidationError,
    SequentialExecutor,
    Stage,
    StreamPool,
    Task,
    ThreadedExecutor,
)
from tests.schedulable.work import Log, one_stage, pool, results


class VerboseExecutor:
    """The executor of section 9.3."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def execute_stage(
        self, stage: Any, ctx: Any, iter_count: Any, should_run: Any, waits: Any, pool: Any
    ) -> Any:
        for task in stage.tasks:
            if should_run(task):
                print(f"[iter {iter_count}] running {task.name}")
        return self._inner.execute_stage(stage, ctx, iter_count, should_run, waits, pool)

    def shutdown(self) -> None:
        self._inner.shutdown()


INNER: list[Callable[[], Any]] = [SequentialExecutor, ThreadedExecutor]


def ahead(log: Log) -> Schedule:
    """Return a schedule with a copy two batches ahead, declared last, and two users of it."""
    return one_stage(
        log.task("forward", reads=["x"], writes=["step_result"]),
        log.task("step", depends_on=["forward"]),
        log.task("copy", lookahead=2, stream="memcpy", writes=["x"]),
        streams=("default", "memcpy"),
    )


@pytest.mark.parametrize("inner", INNER)
def test_an_executor_that_wraps_one_of_ours_sees_every_period(
    inner: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """It gets the tasks of each period that have a batch, in the order of the period."""
    log = Log()
    with SchedulablePipeline(ahead(log), pool("memcpy"), executor=VerboseExecutor(inner())) as pipe:
        assert list(results(pipe, range(3))) == [0, 1, 2]
        told = [
            f"[iter {period}] running {task}"
            for period in range(5)
            for task in ("forward", "step", "copy")
            if (period < 3 if task == "copy" else period >= 2)
        ]
        assert capsys.readouterr().out.splitlines() == told
        assert [f"[iter {run.period}] running {run.task}" for run in log.runs] == told
        assert {run.thread for run in log.runs} == {threading.current_thread().name}
        assert pipe.step(7) == 7
        assert list(results(pipe, range(3))) == [0, 1, 2]
        with pytest.raises(RuntimeError, match="cannot be replayed one by one"):
            pipe.pipe.enable_shortcut("copy")


class OrderingPool(StreamPool):
    """A pool that records which stream waits for which."""

    def __init__(self, *names: str) -> None:
        super().__init__(dict.fromkeys(names))
        self.ordered: list[tuple[str, str]] = []

    def order(self, later: str, sooner: str) -> None:
        self.ordered.append((later, sooner))


def test_streams_wait_for_what_an_executor_has_submitted() -> None:
    """Each task's stream waits for its inputs; the caller's waits for all after the executor."""
    streams = OrderingPool("default", "memcpy")
    executor = VerboseExecutor(SequentialExecutor())
    with SchedulablePipeline(ahead(Log()), streams, executor=executor) as pipe:
        assert list(results(pipe, range(1))) == [0]
    after = [("default", "default"), ("default", "memcpy")]
    assert streams.ordered == [*after, ("default", "memcpy"), *after]


def test_an_executor_may_run_the_tasks_itself() -> None:
    """Each runs with the context of its own batch, stage by stage."""

    class Own:
        down = 0

        def execute_stage(self, stage: Any, ctx: Any, iter_count: int, *rest: Any) -> None:
            for task in filter(rest[0], stage.tasks):
                assert ctx.of(task).iter_count == iter_count
                task.run(ctx.of(task))

        def shutdown(self) -> None:
            self.down += 1

    log, own = Log(), Own()
    stages = (
        Stage((log.task("a", lookahead=1, writes=["x"]),)),
        Stage((log.task("b", reads=["x"], writes=["step_result"]), log.task("c", lookahead=1))),
    )
    with SchedulablePipeline(Schedule(stages), pool(), executor=own) as pipe:
        assert list(results(pipe, range(3))) == [0, 1, 2]
        assert log.order(1) == ["a", "b", "c"]
        log.runs.clear()
        ctx = pipe.pipe.run_one_serial_iter(5)
        assert [run.task for run in log.runs] == ["a", "c", "b"]
        assert ctx.step_result == 5
    pipe.shutdown()
    assert own.down == 1


def test_a_failure_leaves_nothing_for_the_next_run() -> None:
    """The executor's error is raised unchanged, and no task runs for a batch that is gone."""
    log = Log()

    def fail(ctx: Any) -> None:
        if ctx.slots["batch_cpu"] == 1:
            raise OSError("planted")

    tasks = (log.task("a", lookahead=1), log.task("b", fail, writes=["step_result"]))
    with SchedulablePipeline(
        one_stage(*tasks), pool(), executor=VerboseExecutor(SequentialExecutor())
    ) as pipe:
        batches: Iterator[int] = iter(range(5))
        assert pipe.progress(batches) == 0
        with pytest.raises(OSError, match="planted"):
            pipe.progress(batches)
        log.runs.clear()
        assert pipe.step(9) == 9
        assert [run.batch for run in log.runs] == [9, 9]


def test_random_tasks_are_refused() -> None:
    """Such a task could not be seeded, which would be silent."""
    task = Task.from_fn("noise", print, random=True)
    with pytest.raises(ScheduleValidationError, match="'noise': random is True, and an executor"):
        SchedulablePipeline(one_stage(task), pool(), executor=VerboseExecutor(SequentialExecutor()))


@pytest.mark.parametrize("executor", [object(), VerboseExecutor])
def test_an_executor_needs_the_two_methods(executor: Any) -> None:
    """A class, or an object without them, is refused."""
    with pytest.raises(TypeError, match="with the methods execute_stage and shutdown"):
        SchedulablePipeline(one_stage(Task.from_fn("a", print)), pool(), executor=executor)
