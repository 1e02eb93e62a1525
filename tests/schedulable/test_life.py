"""The life of a ``SchedulablePipeline``, from construction to shutdown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from swpipe.schedulable import DataSlot, Pipeline, SchedulablePipeline, Task, TaskContext
from tests.schedulable.work import Log, one_stage, pool


class CountTokens(Task):
    """The task of the seed's section 9.1."""

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
    """The constructor raises its error."""

    class Fails(CountTokens):
        reads = ()

        def init(self, ctx: TaskContext) -> None:
            raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        Pipeline([Fails()], pool())


def ahead(log: Log) -> SchedulablePipeline:
    """Return a pipeline with a copy two batches ahead, on a thread of its own."""
    return SchedulablePipeline(
        one_stage(
            log.task("copy", lookahead=2, stream="memcpy", writes=["x"]),
            log.task("train", reads=["x"], writes=["step_result"]),
            streams=("default", "memcpy"),
        ),
        pool("memcpy"),
        executor="threaded",
    )


def test_after_shutdown_nothing_runs() -> None:
    """A second call does nothing, nor does leaving the block."""
    with ahead(Log()) as pipe:
        pipe.progress(iter(range(3)))
        pipe.shutdown()
        pipe.shutdown()
        for call in (lambda: pipe.progress(iter([1])), lambda: pipe.step(1), pipe.drain):
            with pytest.raises(RuntimeError, match="the pipeline is closed"):
                call()


def test_nvtx_tags_are_ranges_within_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool shows them in the domain of the tasks' ranges, with the number of the iteration."""
    nvtx = pytest.importorskip("nvtx")
    events: list[tuple[str, str, int]] = []

    @contextmanager
    def annotate(message: str, domain: str, payload: int) -> Iterator[None]:
        events.append((message, domain, payload))
        yield
        events.append((f"end of {message}", domain, payload))

    monkeypatch.setattr(nvtx, "annotate", annotate)
    task = Task.from_fn("a", lambda ctx: events.append(("run", "", 0)), nvtx_tag="inner")
    with Pipeline([task], pool()) as pipe:
        pipe.step(0)
        pipe.step(0)
    assert events == [
        event
        for i in range(2)
        for event in (("inner", "swpipe", i), ("run", "", 0), ("end of inner", "swpipe", i))
    ]


def test_a_tag_without_a_tool_or_without_the_package_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nvtx itself finds no tool; the package is missing on systems for which it has no wheels."""
    runs: list[int] = []
    task = Task.from_fn("a", lambda ctx: runs.append(ctx.iter_count), nvtx_tag="inner")
    with Pipeline([task], pool()) as pipe:
        pipe.step(0)
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with Pipeline([task], pool()) as pipe:
        pipe.step(0)
    assert runs == [0, 0]
