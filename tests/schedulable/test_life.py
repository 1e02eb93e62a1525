"""From construction to shutdown: what a ``SchedulablePipeline`` does at each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swpipe._engine import observers
from swpipe.schedulable import (
    DataSlot,
    Pipeline,
    SchedulablePipeline,
    Task,
    TaskContext,
    translation,
)
from tests.schedulable.work import Log, one_stage, pool


class CountTokens(Task):
    """As the seed's section 9.1 has it."""

    name = "count_tokens"
    stream = "default"
    lookahead = 0
    reads = (DataSlot("batch_gpu", 0),)
    writes = (DataSlot("token_count", 0),)
    inits = 0

    def init(self, ctx: TaskContext) -> None:
        assert (ctx.iter_count, ctx.stream_pool.names) == (0, ("default",))
        assert "batch_gpu" not in ctx.slots
        self.inits += 1

    def run(self, ctx: TaskContext) -> None:
        batch = ctx.slots["batch_gpu"]
        ctx.slots.set("token_count", batch.numel())


def test_a_subclass_is_a_task_and_arguments_win_over_its_attributes() -> None:
    """A name stands for the slot of the task's own batch; ``init`` is called once."""
    count = CountTokens()
    assert (count.name, count.reads) == ("count_tokens", (DataSlot("batch_gpu", 0),))
    assert CountTokens("other", lookahead=2, reads=["x"]).reads == (DataSlot("x", 2),)
    assert CountTokens("other", reads="x", writes=DataSlot("y")).reads == (DataSlot("x"),)
    late = Task.from_fn("a", print, cross_iter_depends_on=["b", ("c", -2)])
    assert late.cross_iter_depends_on == (("b", -1), ("c", -2))
    batch = Task.from_fn(
        "copy", lambda ctx: ctx.slots.set("batch_gpu", ctx.slots["batch_cpu"]), writes=["batch_gpu"]
    )
    result = Task.from_fn(
        "result",
        lambda ctx: ctx.slots.set("step_result", ctx.slots["token_count"]),
        reads=["token_count"],
        writes=["step_result"],
    )
    with Pipeline([count, batch, result], pool()) as pipe:
        assert pipe.step(torch.zeros(3, 4)) == 12
        assert pipe.schedule.all_tasks() == (count, batch, result)
        assert pipe.schedule.in_flight_batches == 1
    assert count.inits == 1


def test_init_that_fails_leaves_no_pipeline() -> None:
    """Its error comes out of the constructor."""

    class Fails(CountTokens):
        reads = ()

        def init(self, ctx: TaskContext) -> None:
            raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        Pipeline([Fails()], pool())


def ahead(log: Log) -> SchedulablePipeline:
    """A copy two batches ahead, on a thread of its own."""
    return SchedulablePipeline(
        one_stage(
            log.task("copy", lookahead=2, stream="memcpy", writes=["x"]),
            log.task("train", reads=["x"], writes=["step_result"]),
            streams=("default", "memcpy"),
        ),
        pool("memcpy"),
        executor="threaded",
    )


def test_push_overlaps_without_an_iterator() -> None:
    """None while it fills; ``flush`` returns the last ones."""
    log = Log()
    with ahead(log) as pipe:
        assert [pipe.push(n) for n in range(5)] == [None, None, 0, 1, 2]
        assert [*pipe.flush()] == [3, 4]
        assert log.periods("train") == [(n + 2, n) for n in range(5)]


def test_after_shutdown_nothing_runs() -> None:
    """Twice is as good as once, and as leaving the block."""
    with ahead(Log()) as pipe:
        pipe.progress(iter(range(3)))
        pipe.shutdown()
        pipe.shutdown()
        for call in (lambda: pipe.progress(iter([1])), lambda: pipe.step(1), pipe.drain):
            with pytest.raises(RuntimeError, match="the pipeline is closed"):
                call()


def test_nvtx_tags_are_ranges_within_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tool shows them; the iteration goes with the name."""
    told: list[tuple[str, int]] = []

    class Ranges(observers.Observer):
        def start(self, ins: Any, iteration: int) -> None:
            told.append((ins.task, iteration))

        def stop(self, ins: Any, iteration: int, exists: bool = True) -> None:
            told.append((f"end of {ins.task}", iteration))

    task = Task.from_fn("a", lambda ctx: told.append(("run", 0)), nvtx_tag="inner")
    with Pipeline([task], pool()) as pipe:
        pipe.step(0)
        assert told == [("run", 0)]
        told.clear()
        monkeypatch.setattr(translation, "nvtx_ranges", Ranges)
        pipe.step(0)
    assert told == [("inner", 1), ("run", 0), ("end of inner", 1)]
