"""Spans: which task ran on which iteration, where, from when to when; measured or predicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from swpipe._engine.program import ADMIT, RETIRE

Kind: TypeAlias = Literal["thread", "stream"]

OWN = (ADMIT, RETIRE)
"""The turns that are swpipe's own."""


class Row(NamedTuple):
    """One line of a timeline: a thread group, or a stream of the device."""

    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class Span:
    """One task's turn on one iteration.

    Times are nanoseconds from an origin that all spans of a timeline share.

    Attributes:
        task: The task's name; ``<admit>`` and ``<retire>`` are swpipe's own.
        iteration: From 0.
        row: Where it ran. A task that gives work to a device has a span on its thread, and another
            on its stream.
        start_ns: When the task's function was called, or its work on the stream began.
        end_ns: When it returned, or its work on the stream was done.
        wait_ns: How long the thread had stood at this turn before it began; 0 on streams.
    """

    task: str
    iteration: int
    row: Row
    start_ns: int
    end_ns: int
    wait_ns: int = 0

    @property
    def duration_ns(self) -> int:
        """From start to end."""
        return self.end_ns - self.start_ns


def in_order(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans by start, then by end, then by row; what remains equal keeps its order."""
    return tuple(sorted(spans, key=lambda span: (span.start_ns, span.end_ns, span.row)))


def extent_ns(spans: Iterable[Span]) -> tuple[int, int]:
    """The first start and the last end; waiting before the first start does not count.

    Raises:
        ValueError: There is no span.
    """
    spans = tuple(spans)
    if not spans:
        raise ValueError("there are no spans: nothing ran to its end while the trace was recorded")
    return min(span.start_ns for span in spans), max(span.end_ns for span in spans)


def rows_of(spans: Iterable[Span]) -> tuple[Row, ...]:
    """The rows as a batch passes through them: threads, then streams, each by its first task."""
    first: dict[Row, tuple[bool, bool, int]] = {}
    for span in spans:
        rank = (span.row.kind == "stream", span.task in OWN, span.start_ns)
        first[span.row] = min(rank, first.get(span.row, rank))
    return tuple(sorted(first, key=lambda row: (first[row], row)))


def from_zero(
    spans: Sequence[Span], beside: Sequence[Span] = ()
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Both moved in time alike, so that the first start among ``spans`` is at 0.

    Raises:
        ValueError: There is no span.
    """
    begin_ns, _ = extent_ns(spans)

    def moved(span: Span) -> Span:
        return replace(span, start_ns=span.start_ns - begin_ns, end_ns=span.end_ns - begin_ns)

    return tuple(map(moved, spans)), tuple(map(moved, beside))
