"""Spans: which task ran on which iteration, where and when; measured or predicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from swpipe.program import OWN

Kind: TypeAlias = Literal["thread", "stream"]


class Row(NamedTuple):
    """One line of a timeline: a thread group or a stream."""

    kind: Kind
    name: str

    @property
    def label(self) -> str:
        """The name of the row in text."""
        return self.name if self.kind == "thread" else f"stream {self.name}"


@dataclass(frozen=True, slots=True)
class Span:
    """One run of a task on one iteration.

    Times are nanoseconds from an origin that all spans of a timeline share.

    Attributes:
        task: The task's name, or ``<admit>`` or ``<retire>``.
        row: The row of the run. A task that queues device work has one span on its thread and one
            on its stream.
        start_ns: When the task's function was called, or its work on the stream started.
        end_ns: When the function returned, or the work on the stream was done.
        wait_ns: How long the thread waited before the start; 0 on streams.
    """

    task: str
    iteration: int
    row: Row
    start_ns: int
    end_ns: int
    wait_ns: int = 0

    @property
    def duration_ns(self) -> int:
        """The time from start to end."""
        return self.end_ns - self.start_ns


def in_order(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return spans sorted by start, end and row."""
    return tuple(sorted(spans, key=lambda span: (span.start_ns, span.end_ns, span.row)))


def extent_ns(spans: Sequence[Span]) -> tuple[int, int]:
    """Return the first start and the last end, without the wait before the first start.

    Raises:
        ValueError: There is no span.
    """
    if not spans:
        raise ValueError("there are no spans: nothing ran to its end while the trace was recorded")
    return min(span.start_ns for span in spans), max(span.end_ns for span in spans)


def rows_of(spans: Iterable[Span]) -> tuple[Row, ...]:
    """Return the rows in the order in which a batch passes through them.

    Threads come first, then streams, each by first task.
    """
    first: dict[Row, tuple[bool, bool, int]] = {}
    for span in spans:
        # A row ranks by its first task. swpipe's own tasks, which start early, count only if the
        # row has no other task.
        rank = (span.row.kind == "stream", span.task in OWN, span.start_ns)
        first[span.row] = min(rank, first.get(span.row, rank))
    # The row itself breaks ties, so that pictures of equal traces are equal.
    return tuple(sorted(first, key=lambda row: (first[row], row)))


class Panel(NamedTuple):
    """One of several timelines, with its heading."""

    heading: str
    spans: Sequence[Span]

    def by_row(self) -> dict[Row, list[Span]]:
        """Return each row with its spans, in the order of ``rows_of``."""
        return {
            row: [span for span in self.spans if span.row == row] for row in rows_of(self.spans)
        }

    def from_zero(self) -> Panel:
        """Return the panel, moved in time so that its first span starts at 0."""
        # Without the first wait: it would leave an empty stretch at the left.
        begin_ns, _ = extent_ns(self.spans)

        # Waits need no move: they are lengths, not times.
        moved = [
            replace(span, start_ns=span.start_ns - begin_ns, end_ns=span.end_ns - begin_ns)
            for span in self.spans
        ]
        return Panel(self.heading, moved)
