"""The chain of spans that determines the length of a run."""

from __future__ import annotations

import pytest
from hypothesis import given

from swpipe import PipelinePlan, SWPipeline, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import lower_bounds
from swpipe.trace import Row, Span, Trace
from swpipe.trace.critical_path import critical_path
from swpipe.trace.perfetto import Arrow
from tests.profiler.sleepers import overlapped, sleepers
from tests.support.budget import examples
from tests.support.virtual_clock import TimedHost
from tests.trace.test_lanes import ANY_SPANS, ARROWS, IO, READ_0, SPANS, TRAIN_0, TRAIN_1


def traced(plan: PipelinePlan, host: TimedHost, iterations: int = 12, **ms: float) -> Trace:
    """Return the trace of tasks that take these times."""
    with SWPipeline(plan, sleepers(host, **ms), device="cpu") as pipe, pipe.trace() as trace:
        pipe.run(range(iterations))
    return trace


def test_a_path_by_hand() -> None:
    """It goes from the last end backwards: each link has its cause and the time between."""
    path = critical_path(SPANS, ARROWS)
    assert [(link.span, link.why, link.gap_ns) for link in path.links] == [
        (READ_0, "begin", 0),
        (TRAIN_0, "dependence", 0),
        (TRAIN_1, "row", 1),
    ]
    assert path.length_ns == 8


def test_a_task_waits_for_an_earlier_iteration_of_another() -> None:
    """The arrow says how far back."""
    spans = [Span("train", i, TRAIN_0.row, 10 * i, 10 * i + 5) for i in range(3)]
    read = Span("read", 2, IO, 5, 8)
    links = critical_path([*spans[:1], read], [Arrow("train", "read", 2)]).links
    assert [(link.span, link.why) for link in links] == [(spans[0], "begin"), (read, "dependence")]


def test_work_on_a_stream_begins_within_the_time_of_its_thread() -> None:
    """The path has the thread's time before the work began as a gap."""
    thread, stream = TRAIN_0.row, Row("stream", "caller's")
    spans = [
        span
        for i in range(8)
        for span in (
            Span("work", i, thread, 10 * i, 10 * i + 3),
            Span("work", i, stream, 10 * i + 2, 10 * i + 9),
            Span("<retire>", i, thread, 10 * i + 9, 10 * i + 10),
        )
    ]
    found = critical_path(spans, []).per_iteration()
    assert found == pytest.approx({"work": 7e-6, "gaps": 2e-6, "<retire>": 1e-6})


@examples("timelines", 100)
@given(spans=ANY_SPANS)
def test_the_parts_of_a_path_add_up_to_its_length(spans: list[Span]) -> None:
    """This holds for any overlap; and it ends where the last span ends."""
    path = critical_path(spans, ARROWS)
    worked = sum(
        0 if after.why == "queued" else before.span.duration_ns
        for before, after in zip(path.links, path.links[1:], strict=False)
    )
    gaps = sum(link.gap_ns for link in path.links)
    assert worked + path.links[-1].span.duration_ns + gaps == path.length_ns
    assert path.links[-1].span.end_ns == max(span.end_ns for span in spans)


def test_spans_that_take_no_time_are_not_each_others_cause() -> None:
    """Two depend on each other at the same moment."""
    spans = [Span("a", 0, IO, 5, 5), Span("b", 0, Row("thread", "default"), 5, 5)]
    assert len(critical_path(spans, [Arrow("a", "b"), Arrow("b", "a")]).links) == 2


def test_the_busiest_thread_is_the_path(host: TimedHost) -> None:
    """Per iteration it takes the interval, and its edges are those of the thread."""
    plan = overlapped({"io": ["read", "decode"], "default": ["train"]})
    path = traced(plan, host, read=3, decode=4, train=5).critical_path()
    assert path.per_iteration() == pytest.approx({"read": 3.0, "decode": 4.0, "gaps": 0.0})
    assert "read i -> decode i (dependence)" in path.edges()
    assert "decode i -> read i+1 (the thread 'io' was busy)" in path.edges()
    assert path.format().startswith("critical path, per iteration 7.000 ms: decode 4.000, read 3")


def test_a_cycle_of_dependences_is_the_path(host: TimedHost) -> None:
    """It is the one that the planner's bound names."""
    plan = PipelinePlan(
        {
            "embed": TaskSchedule(thread_group="io"),
            "train": TaskSchedule(stage=1),
            "other": TaskSchedule(stage=1),
        },
        deps=[("train", "embed"), ("other", "embed")],
        cross_iter_deps=[("embed", "train", 2)],
        pipeline_depth=3,
    )
    ms = {"embed": 6.0, "train": 6.0, "other": 1.0}
    trace = traced(plan, host, 20, **ms)
    costs = CostModel({name: TaskCost(1000 * cost) for name, cost in ms.items()})
    bounds = lower_bounds(plan, costs, streams=False)
    interval_ms = trace.initiation_interval_s * 1e3  # type: ignore[operator]
    assert interval_ms == pytest.approx(bounds.ii_us / 1e3)
    assert sum(trace.critical_path().per_iteration().values()) == pytest.approx(interval_ms)


def test_a_path_without_a_steady_state_is_told_in_full(host: TimedHost) -> None:
    """It has one iteration."""
    path = traced(overlapped({"default": ["read", "train"]}), host, 1, read=1, train=2)
    assert path.critical_path().per_iteration() == {}
    assert "3.000 ms: " in path.critical_path().format()
