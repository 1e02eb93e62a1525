"""``assert_overlaps`` and its siblings look at the order of spans, never at how long they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.testing import assert_after, assert_never_overlaps, assert_overlaps
from swpipe.trace import Row, Span, Trace

IO, MAIN, COPY = Row("thread", "io"), Row("thread", "default"), Row("stream", "memcpy")


def trace_of(plan: PipelinePlan, copy: Callable[[Any], None], forward: Any) -> Trace:
    tasks = [PipelineTask("copy", copy), PipelineTask("forward", forward)]
    with SWPipeline(plan, tasks, check_effects=False, device="cpu") as pipe, pipe.trace() as trace:
        pipe.run(range(4))
    return trace


def plan_with(stage: int, group: str) -> PipelinePlan:
    schedule = {"copy": TaskSchedule(0, thread_group=group), "forward": TaskSchedule(stage)}
    return PipelinePlan(schedule, deps=[("forward", "copy")])


def test_tasks_that_overlap_do_so_on_a_machine_of_any_speed() -> None:
    """The copy ahead waits in mid-task until a forward has begun."""
    begun = threading.Event()

    def copy(ctx: Any) -> None:
        if ctx.iter_idx:
            assert begun.wait(60)

    trace = trace_of(plan_with(1, "io"), copy, lambda ctx: begun.set())
    assert_after(trace, "forward", "copy")
    assert_overlaps(trace, "copy", "forward")


def test_a_plan_that_overlaps_nothing_is_told_with_the_mend() -> None:
    """Two tasks on one thread."""
    trace = trace_of(plan_with(1, "default"), lambda ctx: None, lambda ctx: None)
    with pytest.raises(AssertionError, match="both are on the thread 'default'.*thread_group of"):
        assert_overlaps(trace, "copy", "forward")
    assert_never_overlaps(trace, "copy", "forward")


def test_a_dependence_that_prevents_it_is_named() -> None:
    """On two threads, and in the same stage."""
    trace = trace_of(plan_with(0, "io"), lambda ctx: None, lambda ctx: None)
    with pytest.raises(AssertionError) as caught:
        assert_overlaps(trace, "copy", "forward")
    said = str(caught.value)
    assert said.startswith("'copy' and 'forward' never ran at the same time, in 4 and 4 runs. copy")
    assert "forward i starts when copy i is done, on which it depends (4 of 4 runs)" in said


SPANS = (
    Span("copy", 0, IO, 0, 1),
    Span("copy", 0, COPY, 1, 2_000_000),
    Span("copy", 1, COPY, 2_000_000, 4_000_000),
    Span("forward", 0, MAIN, 2_000_000, 3_000_000),
    Span("forward", 1, MAIN, 4_000_000, 5_000_000),
)


def test_work_on_a_stream_counts_in_place_of_the_call() -> None:
    """Copy 1 runs while forward 0 does, on its stream."""
    trace = Trace(SPANS)
    assert_overlaps(trace, "copy", "forward")
    assert_after(trace, "forward", "copy")
    with pytest.raises(AssertionError) as caught:
        assert_never_overlaps(trace, "forward", "copy")
    assert str(caught.value) == (
        "'forward' of iteration 0 and 'copy' of iteration 1 ran at the same time, on the thread "
        "'default' and the stream 'memcpy'"
    )


def test_a_consumer_that_starts_early_is_named() -> None:
    """At the distance that is asked for."""
    trace = Trace(SPANS)
    with pytest.raises(AssertionError) as caught:
        assert_after(trace, "copy", "forward", 1)
    assert str(caught.value) == (
        "'copy' of iteration 1 started before 'forward' of iteration 0 had ended, on the stream "
        "'memcpy' and the thread 'default'"
    )
    assert_after(trace, "forward", "forward", 1)


def test_a_device_s_times_are_rounded() -> None:
    """Of two that follow each other, one may seem to begin a microsecond early."""
    late = Trace([Span("a", 0, COPY, 0, 2_000), Span("b", 0, Row("stream", "x"), 1_500, 9_000)])
    assert_never_overlaps(late, "a", "b")
    assert_after(late, "b", "a")
    host = Trace([Span("a", 0, IO, 0, 2_000), Span("b", 0, MAIN, 1_500, 9_000)])
    assert_overlaps(host, "a", "b")
    with pytest.raises(AssertionError):
        assert_after(host, "b", "a")


def test_a_stream_may_be_off_against_a_thread_as_the_trace_says() -> None:
    """Not against another stream: the trace puts them all in one place beside the threads."""
    call, work = Span("b", 0, MAIN, 1_000_000, 9_000_000), Span("a", 0, COPY, 0, 1_020_000)
    other = Span("b", 0, Row("stream", "x"), 1_000_000, 9_000_000)
    off = Trace([work, call], clock_error_ns=25_000)
    assert_after(off, "b", "a")
    assert_never_overlaps(off, "a", "b")
    for exact in (Trace([work, call]), Trace([work, other], clock_error_ns=25_000)):
        assert_overlaps(exact, "a", "b")
        with pytest.raises(AssertionError):
            assert_after(exact, "b", "a")


@pytest.mark.parametrize("ask", [assert_overlaps, assert_never_overlaps, assert_after])
def test_a_task_that_is_not_there_is_an_error(ask: Callable[..., None]) -> None:
    """A misspelt name must not pass a test."""
    with pytest.raises(ValueError, match="no run of 'copies'; it has copy, forward"):
        ask(Trace(SPANS), "forward", "copies")
    with pytest.raises(ValueError, match="no run of 'copy'; it has none"):
        ask(Trace(), "copy", "forward")


def test_iterations_that_do_not_belong_together_are_an_error() -> None:
    """Nothing was looked at."""
    with pytest.raises(ValueError, match="comes 2 before one of 'copy': record more"):
        assert_after(Trace(SPANS), "copy", "forward", 2)
