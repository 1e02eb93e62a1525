"""Which tasks ran at the same time, and which after which, by the order of a trace's spans.

Only the order of starts and ends counts, never how long anything took: what holds on a fast machine
holds on a busy one. A task's runs are its work on streams, if it has any there, or else its calls
on its thread.
"""

from __future__ import annotations

from itertools import product

from swpipe.trace import Span, Trace


def overlaps(trace: Trace, one: str, other: str) -> bool:
    """Whether some run of one task, on whatever iteration, took place while the other one ran."""
    pairs = product(_runs(trace, one), _runs(trace, other))
    return any(first is not second and _meet(first, second) for first, second in pairs)


def early(trace: Trace, consumer: str, producer: str, distance: int = 0) -> list[str]:
    """Runs of the consumer that started before the producer, ``distance`` ago, had ended."""
    ended = {span.iteration: span for span in _runs(trace, producer)}
    pairs = [(one, ended.get(one.iteration - distance)) for one in _runs(trace, consumer)]
    return [
        f"{after.task} of iteration {after.iteration} before {before.task} of {before.iteration}"
        for after, before in pairs
        if before is not None and after.start_ns + _slack_ns(after, before) < before.end_ns
    ]


def _runs(trace: Trace, task: str) -> list[Span]:
    found = [span for span in trace.spans if span.task == task]
    return [span for span in found if span.row.kind == "stream"] or found


def _meet(one: Span, other: Span) -> bool:
    meet_ns = min(one.end_ns, other.end_ns) - max(one.start_ns, other.start_ns)
    return meet_ns > _slack_ns(one, other)


def _slack_ns(*spans: Span) -> int:
    """By how much a device's times may be off: of single precision, and of half a microsecond."""
    on_streams = [span for span in spans if span.row.kind == "stream"]
    return max((1000 + (span.end_ns >> 22) for span in on_streams), default=0)
