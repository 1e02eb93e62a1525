"""The critical path: the chain of spans and gaps that leads from the first start to the last end.

It is found backwards from the last span: each link is what ended last of all that the span had to
come after (``swpipe.trace.causes``). Times that are not on it do not matter: if a task that is not
on the path took nothing, the run would end as late. Where two chains are equally long, one of them
is on the path, and both have to be shorter.

In the steady state the path repeats, and so its time per iteration is the interval. The first and
last iterations fill and drain the pipeline; ``per_iteration`` leaves them out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from swpipe.trace.causes import Causes, Why
from swpipe.trace.perfetto import Arrow
from swpipe.trace.span import Kind, Row, Span, extent_ns

GAPS = "gaps"
"""What of the path is no task."""


@dataclass(frozen=True, slots=True)
class Link:
    """One span of the path, and how the path came to it.

    Attributes:
        span: The span.
        why: Why it started when it did: after the span before it on its "row", after a
            "dependence", or once the host had "queued" it; "begin" for the first one.
        gap_ns: From the end of the link before to the start of this one; for "queued", from the
            start of the link before.
    """

    span: Span
    why: Why
    gap_ns: int


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The links, the earliest first."""

    links: tuple[Link, ...]

    @property
    def length_ns(self) -> int:
        """From the first start to the last end."""
        return self.links[-1].span.end_ns - self.links[0].span.start_ns

    def edges(self) -> tuple[str, ...]:
        """The edges of the steady state in words, the most frequent ones, each once."""
        counts = Counter(_words(before.span, after) for before, after in self._steady())
        most = max(counts.values(), default=0)
        return tuple(words for words, count in counts.items() if 2 * count > most)

    def per_iteration(self) -> dict[str, float]:
        """Task, and "gaps", to milliseconds of the path per iteration, in the steady state."""
        found: dict[str, float] = defaultdict(float)
        for (task, _), ms in self.by_kind().items():
            found[task] += ms
        return dict(found)

    def by_kind(self) -> dict[tuple[str, Kind], float]:
        """The same, apart for what a task does on its thread and on its stream.

        A gap is on the row of the span that comes after it.
        """
        steady = self._steady()
        if not steady:
            return {}
        iterations = steady[-1][1].span.iteration - steady[0][0].span.iteration
        found: dict[tuple[str, Kind], float] = defaultdict(float)
        for before, after in steady:
            worked = 0 if after.why == "queued" else before.span.duration_ns
            found[before.span.task, before.span.row.kind] += worked
            found[GAPS, after.span.row.kind] += after.gap_ns
        return {key: ns / 1e6 / iterations for key, ns in found.items()}

    def _steady(self) -> list[tuple[Link, Link]]:
        """The pairs of links between two visits to the same task, as far apart as possible."""
        iterations = sorted({link.span.iteration for link in self.links})
        inner = set(iterations[len(iterations) // 4 :])
        first: dict[tuple[str, Row], int] = {}
        begin = end = 0
        for place, link in enumerate(self.links):
            if link.span.iteration in inner:
                since = first.setdefault((link.span.task, link.span.row), place)
                apart = link.span.iteration - self.links[since].span.iteration
                if apart > 0 and place - since > end - begin:
                    begin, end = since, place
        return [(self.links[k], self.links[k + 1]) for k in range(begin, end)]

    def format(self) -> str:
        """What the path consists of, per iteration, and its edges."""
        parts = self.per_iteration()
        if not parts:
            tasks = " -> ".join(f"{link.span.task} {link.span.iteration}" for link in self.links)
            return f"critical path: {self.length_ns / 1e6:.3f} ms: {tasks}"
        longest = sorted(parts.items(), key=lambda item: -item[1])
        each = ", ".join(f"{task} {ms:.3f}" for task, ms in longest if ms >= 0.001)
        lines = [f"critical path, per iteration {sum(parts.values()):.3f} ms: {each}"]
        return "\n".join([*lines, *(f"  {edge}" for edge in self.edges())])


def critical_path(spans: Sequence[Span], arrows: Sequence[Arrow]) -> CriticalPath:
    """The critical path of a timeline, by the dependences of its plan.

    Raises:
        ValueError: There is no span.
    """
    extent_ns(spans)  # refuses an empty timeline
    causes = Causes(spans, arrows)
    links: list[Link] = []
    span: Span | None = max(spans, key=lambda each: (each.end_ns, each.start_ns))
    seen: set[int] = set()
    while span is not None:
        seen.add(id(span))
        cause = causes.of(span, seen)
        gap_ns = 0 if cause.span is None else span.start_ns - cause.end_ns
        links.append(Link(span, cause.why, gap_ns))
        span = cause.span
    return CriticalPath(tuple(reversed(links)))


def _words(before: Span, after: Link) -> str:
    step = after.span.iteration - before.iteration
    at = f"{after.span.task} i{step:+d}" if step else f"{after.span.task} i"
    busy = f"the {after.span.row.kind} {after.span.row.name!r} was busy"
    what = {"row": busy, "queued": "queued by its thread"}.get(after.why, after.why)
    return f"{before.task} i -> {at} ({what})"
