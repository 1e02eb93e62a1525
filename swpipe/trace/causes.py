"""The cause of a span's start: the latest end of everything that the span had to come after.

    thread io       [copy i ]--------(dependence)------.
    thread default  [backward i-1]..... waits .........[forward i]
                              '------(same row)--------'

A span comes after

- the span before it on its row;
- the tasks that its task depends on, on the iterations that the plan names; work on a stream comes
  after their work on streams, if they have any;
- ``<admit>`` of its iteration; and ``<retire>`` comes after all tasks of the iteration;
- for work on a stream, the start of the task that queued it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from swpipe.core.plan import PULL
from swpipe.program import ADMIT, OWN, RETIRE
from swpipe.trace.perfetto import Arrow
from swpipe.trace.span import Span, in_order

Why: TypeAlias = Literal["row", "dependence", "queued", "begin"]
"""The reason for a start: the row was busy, a dependence, not queued yet, or nothing recorded."""


class Cause(NamedTuple):
    """The span that another span came after, and when that span allowed the start.

    Attributes:
        span: None if nothing that was recorded comes before.
        end_ns: The time from which on this cause no longer prevented the start.
    """

    why: Why
    span: Span | None
    end_ns: int


class Causes:
    """The causes of all spans of a timeline, by the dependences of its plan."""

    def __init__(self, spans: Sequence[Span], arrows: Sequence[Arrow]) -> None:
        self._before: dict[int, Span] = {}
        self._of: dict[tuple[str, int, str], Span] = {}
        self._needed: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._in_iteration: dict[int, list[Span]] = defaultdict(list)
        for arrow in arrows:
            self._needed[arrow.consumer].append((arrow.producer, arrow.distance))
        last: dict[object, Span] = {}
        for span in in_order(spans):
            if span.row in last:
                self._before[id(span)] = last[span.row]
            last[span.row] = span
            # The last span of this kind counts, if a task has several.
            self._of[span.task, span.iteration, span.row.kind] = span
            self._in_iteration[span.iteration].append(span)

    def of(self, span: Span, visited: Collection[int] = ()) -> Cause:
        """Return the cause of a span, which is one of the given spans.

        Args:
            span: The span.
            visited: Ids of spans that are not the cause: spans that take no time could otherwise be
                causes of each other.
        """
        possible = (
            cause
            for cause in self._candidates(span)
            # A cause that ends after the start, such as by an error of the device's clock, explains
            # nothing.
            if cause.end_ns <= span.start_ns and id(cause.span) not in visited
        )
        # Of several causes, the one that ended last explains the start. If two ended together, a
        # dependence explains it better than the row.
        nothing = Cause("begin", None, span.start_ns - span.wait_ns)
        return max(possible, key=lambda cause: (cause.end_ns, cause.why != "row"), default=nothing)

    def _candidates(self, span: Span) -> Iterator[Cause]:
        """Yield everything that a span had to come after."""
        i = span.iteration
        kind = span.row.kind
        if (before := self._before.get(id(span))) is not None:
            yield Cause("row", before, before.end_ns)
        host = self._of.get((span.task, i, "thread")) if kind == "stream" else None
        if host is not None:
            yield Cause("queued", host, host.start_ns)
        needed = [(task, i - distance) for task, distance in self._needed[span.task]]
        needed += [(PULL, i)] if span.task not in OWN else []
        needed += [(ADMIT, i)] if span.task not in (ADMIT, RETIRE) else []
        # A task without work on streams counts with its span on a thread.
        ended = [self._of.get((*key, kind)) or self._of.get((*key, "thread")) for key in needed]
        if span.task == RETIRE:
            ended += [other for other in self._in_iteration[i] if other.task not in OWN]
        yield from (Cause("dependence", end, end.end_ns) for end in ended if end is not None)
