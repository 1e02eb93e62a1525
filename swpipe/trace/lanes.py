"""The times of each thread and stream: busy, waiting and for what, idle.

    thread  |== busy ==|.. waits for copy ..|== busy ==|      |== busy ==|
                                                        idle

A thread waits between arriving at a task and starting it. It is idle when it has nothing to do: a
worker after its last task, or the caller's thread outside of swpipe. A stream does not wait in this
sense: it is idle when it has no work. The parts of a lane add up to its length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swpipe.program import OWN
from swpipe.trace.causes import Causes
from swpipe.trace.perfetto import Arrow
from swpipe.trace.span import Panel, Row, Span, extent_ns, in_order

ELSE = "(else)"
"""A wait for something else: another thread's wake-up, or an event that was not recorded."""


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """The time of one thread or stream, in nanoseconds.

    Attributes:
        row: The thread group or stream.
        busy_ns: The time in which it ran tasks, or work on the stream.
        waiting_ns: Task to the time in which it waited for that task, on any iteration; ``ELSE``
            for waits that no recorded task explains.
        idle_ns: The remaining time.
    """

    row: Row
    busy_ns: int
    waiting_ns: Mapping[str, int]
    idle_ns: int

    @property
    def length_ns(self) -> int:
        """The sum of all parts: from the trace's first start to its last end."""
        return self.busy_ns + sum(self.waiting_ns.values()) + self.idle_ns


def lanes(spans: Sequence[Span], arrows: Sequence[Arrow]) -> tuple[LaneTimes, ...]:
    """Return the times of each row of a timeline.

    Raises:
        ValueError: There is no span.
    """
    begin_ns, end_ns = extent_ns(spans)
    causes = Causes(spans, arrows)
    times = []
    for row, on_row in Panel("", in_order(spans)).by_row().items():
        reached_ns = begin_ns
        waiting: Counter[str] = Counter()
        for span in on_row:
            # A wait counts only from the end of the span before it.
            from_ns = max(reached_ns, span.start_ns - span.wait_ns)
            if from_ns < span.start_ns:
                cause = causes.of(span)
                until_ns = from_ns
                if cause.span is not None and cause.why != "row":
                    # The wait for the cause ends with the cause; the rest is the thread's wake-up.
                    until_ns = max(from_ns, cause.end_ns)
                    waiting[cause.span.task] += until_ns - from_ns
                waiting[ELSE] += span.start_ns - until_ns
            reached_ns = max(reached_ns, span.end_ns)
        busy_ns = covered_ns(on_row)
        idle_ns = end_ns - begin_ns - busy_ns - waiting.total()
        times.append(LaneTimes(row, busy_ns, dict((+waiting).most_common()), idle_ns))
    return tuple(times)


def hidden(spans: Sequence[Span], tasks: Sequence[str]) -> float | None:
    """Return the share of the tasks' time in which something else ran too, from 0 to 1.

    A task's time is that of its work on a stream if it has any there, or else that on its thread.
    All other tasks, on any row, count as something else.

    Returns:
        None if the tasks took no time.
    """
    # The host's part of a task with work on a stream only submits that work.
    on_stream = {span.task for span in spans if span.row.kind == "stream"}

    def counts(span: Span) -> bool:
        return span.row.kind == "stream" or span.task not in on_stream

    mine = [span for span in spans if span.task in tasks and counts(span)]
    others = [s for s in spans if s.task not in (*tasks, *OWN) and counts(s)]
    mine_ns = covered_ns(mine)
    # Inclusion and exclusion: the overlap of two sets of spans, from the lengths of their unions.
    both_ns = mine_ns + covered_ns(others) - covered_ns([*mine, *others])
    return both_ns / mine_ns if mine_ns else None


def covered_ns(spans: Iterable[Span]) -> int:
    """Return the time in which at least one of the spans ran."""
    covered = 0
    reached_ns = -(2**63)
    for span in in_order(spans):
        covered += max(0, span.end_ns - max(span.start_ns, reached_ns))
        reached_ns = max(reached_ns, span.end_ns)
    return covered
