"""The critical path: the chain of spans and gaps that leads from the first start to the last end.

The path is found backwards from the last span: each link is the latest end of everything that the
span had to come after (``swpipe.trace.causes``). Times that are not on the path do not matter: if a
task outside it took no time, the run would end as late. If two chains are equally long, one of them
is the path, and both have to be shortened.

In the steady state the path repeats, so its time per iteration is the initiation interval. The
first and last iterations fill and drain the pipeline; ``per_iteration`` leaves them out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from swpipe.trace.causes import Causes, Why
from swpipe.trace.perfetto import Arrow
from swpipe.trace.span import Kind, Row, Span, extent_ns

GAPS = "gaps"
"""The name of the parts of the path in which no task ran."""


@dataclass(frozen=True, slots=True)
class Link:
    """One span of the path, and how the path came to it.

    Attributes:
        span: The span.
        why: Why the span started when it did: after the span before it on its "row", after a
            "dependence", or once the host had "queued" it; "begin" for the first span.
        gap_ns: From the end of the previous link to the start of this one; for "queued", from the
            start of the previous link.
    """

    span: Span
    why: Why
    gap_ns: int


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The links of the critical path, the earliest first."""

    links: tuple[Link, ...]

    @property
    def length_ns(self) -> int:
        """The time from the first start to the last end."""
        return self.links[-1].span.end_ns - self.links[0].span.start_ns

    def edges(self) -> tuple[str, ...]:
        """Return the most frequent edges of the steady state in words, each once."""
        counts = Counter(_words(before.span, after) for before, after in self._steady())
        most = max(counts.values(), default=0)
        # Rare edges are noise: these occur more than half as often as the most frequent one.
        return tuple(words for words, count in counts.items() if 2 * count > most)

    def per_iteration(self) -> dict[str, float]:
        """Return the milliseconds of the path per iteration, by task, in the steady state.

        The time in which no task ran is under "gaps".
        """
        times_ms: dict[str, float] = defaultdict(float)
        for (task, _), ms in self.by_kind().items():
            times_ms[task] += ms
        return dict(times_ms)

    def by_kind(self) -> dict[tuple[str, Kind], float]:
        """Return the milliseconds of ``per_iteration``, by task and kind of row.

        A gap is on the row of the span that comes after it.
        """
        steady = self._steady()
        if not steady:
            return {}
        # Both ends are the same task, so the links between them cover whole iterations.
        iterations = steady[-1][1].span.iteration - steady[0][0].span.iteration
        times_ns: dict[tuple[str, Kind], float] = defaultdict(float)
        for before, after in steady:
            # After "queued", the path goes on at the start of the host's span, so its duration is
            # not on it.
            worked = 0 if after.why == "queued" else before.span.duration_ns
            times_ns[before.span.task, before.span.row.kind] += worked
            times_ns[GAPS, after.span.row.kind] += after.gap_ns
        return {key: ns / 1e6 / iterations for key, ns in times_ns.items()}

    def _steady(self) -> list[tuple[Link, Link]]:
        """Return the pairs of links between two visits to one task, as far apart as possible."""
        iterations = sorted({link.span.iteration for link in self.links})
        # The first quarter may still belong to the prologue.
        inner = set(iterations[len(iterations) // 4 :])
        first: dict[tuple[str, Row], int] = {}
        begin = end = 0
        for place, link in enumerate(self.links):
            if link.span.iteration in inner:
                since = first.setdefault((link.span.task, link.span.row), place)
                apart = link.span.iteration - self.links[since].span.iteration
                if apart > 0 and place - since > end - begin:
                    begin = since
                    end = place
        return [(self.links[k], self.links[k + 1]) for k in range(begin, end)]

    def format(self) -> str:
        """Return the parts of the path per iteration, and its edges, as text."""
        parts = self.per_iteration()
        if not parts:
            tasks = " -> ".join(f"{link.span.task} {link.span.iteration}" for link in self.links)
            return f"critical path: {self.length_ns / 1e6:.3f} ms: {tasks}"
        longest = sorted(parts.items(), key=lambda item: -item[1])
        each = ", ".join(f"{task} {ms:.3f}" for task, ms in longest if ms >= 0.001)
        lines = [f"critical path, per iteration {sum(parts.values()):.3f} ms: {each}"]
        return "\n".join([*lines, *(f"  {edge}" for edge in self.edges())])


def critical_path(spans: Sequence[Span], arrows: Sequence[Arrow]) -> CriticalPath:
    """Return the critical path of a timeline, by the dependences of its plan.

    Raises:
        ValueError: There is no span.
    """
    extent_ns(spans)  # refuses an empty timeline
    causes = Causes(spans, arrows)
    links: list[Link] = []
    span: Span | None = max(spans, key=lambda each: (each.end_ns, each.start_ns))
    visited: set[int] = set()
    while span is not None:
        # Spans that take no time could be causes of each other, and the path would never end.
        visited.add(id(span))
        cause = causes.of(span, visited)
        gap_ns = 0 if cause.span is None else span.start_ns - cause.end_ns
        links.append(Link(span, cause.why, gap_ns))
        span = cause.span
    return CriticalPath(tuple(reversed(links)))


def _words(before: Span, after: Link) -> str:
    """Return an edge of the path in words."""
    step = after.span.iteration - before.iteration
    at = f"{after.span.task} i{step:+d}" if step else f"{after.span.task} i"
    busy = f"the {after.span.row.kind} {after.span.row.name!r} was busy"
    what = {"row": busy, "queued": "queued by its thread"}.get(after.why, after.why)
    return f"{before.task} i -> {at} ({what})"
