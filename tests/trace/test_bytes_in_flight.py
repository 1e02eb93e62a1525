"""The memory that the iterations of a timeline hold."""

from __future__ import annotations

import pytest

from swpipe.core.plan import PULL
from swpipe.core.task_memory import Block, TaskMemory
from swpipe.trace import Row, Span, Trace
from swpipe.trace.bytes_in_flight import WORKING, Holding

LOADER, MAIN = Row("thread", "loader"), Row("thread", "default")


def two_iterations(retired_ns: int) -> Trace:
    """Return spans in which the second batch is read while the first is used; times are in ns."""
    spans = [
        Span(task, i, row, i * 10 + start, i * 10 + end)
        for i in (0, 1)
        for task, row, start, end in (
            (PULL, LOADER, 0, 2),
            ("read", LOADER, 2, 8),
            ("work", MAIN, 10, 19),
        )
    ]
    retired = [Span("<retire>", i, MAIN, i * 10 + 19, i * 10 + retired_ns) for i in (0, 1)]
    return Trace([*spans, *retired, Span("read", 0, Row("stream", "copy"), 4, 5)])


MEMORY = TaskMemory(
    (Block(PULL, "read", 1, "batch", removed=True), Block("read", "", 10, "x")), {"work": 100}
)


def test_the_peak_consists_of_what_is_held_then() -> None:
    """It is that of both iterations from 12 ns, when the second is read, to 18."""
    found = two_iterations(retired_ns=20).peak_memory(MEMORY)
    assert (found.bytes, found.at_ns, found.iterations) == (121, 12, 2)
    assert found.held == (
        Holding(0, "work", WORKING, 100),
        Holding(0, "read", "x", 10),
        Holding(1, "read", "x", 10),
        Holding(1, PULL, "batch", 1),
    )


def test_a_plan_with_streams_holds_what_was_removed() -> None:
    """The first batch, too, until its iteration is retired."""
    found = two_iterations(retired_ns=20).peak_memory(MEMORY, streams=True)
    assert (found.bytes, found.at_ns) == (122, 12)


def test_memory_waits_for_other_streams() -> None:
    """The caller's stream has work on the first batch, which ends at 30 ns."""
    spans = [
        Span(task, i, MAIN, 10 * i + start, 10 * i + end)
        for i in (0, 1)
        for task, start, end in (("read", 0, 2), ("work", 2, 4), ("<retire>", 4, 5))
    ]
    trace = Trace(
        [
            *spans,
            Span("read", 0, Row("stream", "copy"), 1, 2),
            Span("work", 0, Row("stream", "caller's"), 3, 30),
        ]
    )
    memory = TaskMemory((Block("read", "", 10, "x"),))
    assert trace.peak_memory(memory).bytes == 10
    assert trace.peak_memory(memory, streams=True).bytes == 20


@pytest.mark.parametrize(("retired_ns", "peak"), [(20, 110), (21, 120)])
def test_what_ends_at_a_moment_goes_before_what_begins(retired_ns: int, peak: int) -> None:
    """The work on the second batch begins at 20 ns; the first is held to its end, or not."""
    memory = TaskMemory((Block("work", "", 10),), {"work": 100})
    assert two_iterations(retired_ns).peak_memory(memory).bytes == peak


def test_memory_that_the_next_iteration_frees() -> None:
    """It lives until the end of that iteration's task, or of the timeline."""
    memory = TaskMemory((Block("work", "work", 10, later=1),))
    found = two_iterations(retired_ns=20).peak_memory(memory)
    assert (found.bytes, found.at_ns) == (20, 20)


def test_a_timeline_without_these_tasks_holds_nothing() -> None:
    """The text says so."""
    found = two_iterations(retired_ns=20).peak_memory(TaskMemory((Block("step", "", 1),)))
    assert (found.bytes, found.held) == (0, ())
    assert found.format() == "memory: the iterations in flight hold nothing"
