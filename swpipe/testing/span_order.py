"""Which tasks ran at the same time, and which after which, by the order of a trace's spans.

Only the order of starts and ends counts, never how long anything took: what holds on a fast machine
holds on a busy one. A task's runs are its work on streams, if it has any there, or else its calls
on its thread.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

from swpipe.core.messages import listed
from swpipe.core.task import TaskRef, names_of
from swpipe.trace import Span, Trace
from swpipe.trace.causes import Cause, Causes


def assert_overlaps(trace: Trace, one: TaskRef, other: TaskRef) -> None:
    """Some run of one task, on whatever iteration, took place while the other one ran.

    In a test of a plan::

        with SWPipeline(plan, tasks) as pipe, pipe.trace() as trace:
            pipe.run(batches)
        assert_overlaps(trace, "copy", "forward")

    Raises:
        AssertionError: None did; says why the two start when they do.
        ValueError: The trace has no run of a task.
    """
    runs = _runs(trace, one, other)
    if any(_meets(trace, *pair) for pair in product(*runs)):
        return
    (first, *_), (second, *_) = runs
    message = (
        f"{first.task!r} and {second.task!r} never ran at the same time, in {len(runs[0])} and "
        f"{len(runs[1])} runs"
    )
    if first.row == second.row:
        where = "a stream" if first.row.kind == "stream" else "a thread_group"
        raise AssertionError(
            f"{message}: both are on the {first.row.kind} {first.row.name!r}, which runs one after "
            f"the other. Give one of them {where} of its own in the plan"
        )
    causes = Causes(trace.spans, trace.arrows)
    told = (_told(causes, spans) for spans in runs)
    raise AssertionError(". ".join((message, *told)))


def assert_never_overlaps(trace: Trace, one: TaskRef, other: TaskRef) -> None:
    """No run of one task, on whatever iteration, took place while the other one ran.

    Raises:
        AssertionError: Names the first two that did.
        ValueError: The trace has no run of a task.
    """
    for first, second in product(*_runs(trace, one, other)):
        if first is not second and _meets(trace, first, second):
            raise AssertionError(
                f"{_named(first)} and {_named(second)} ran at the same time, on the "
                f"{first.row.kind} {first.row.name!r} and the {second.row.kind} {second.row.name!r}"
            )


def assert_after(trace: Trace, consumer: TaskRef, producer: TaskRef, distance: int = 0) -> None:
    """Each run of the consumer started when the producer had ended, on ``distance`` iterations ago.

    As a dependence of a plan says it: ``assert_after(trace, "forward", "step", 1)``.

    Raises:
        AssertionError: Names the first one that did not.
        ValueError: The trace has no run of a task, or no two that belong together.
    """
    consumers, producers = _runs(trace, consumer, producer)
    ended = {span.iteration: span for span in producers}
    pairs = [
        (s, ended[s.iteration - distance]) for s in consumers if s.iteration - distance in ended
    ]
    if not pairs:
        raise ValueError(
            f"the trace has no iteration of {producer!r} that comes {distance} before one of "
            f"{consumer!r}: record more iterations"
        )
    for after, before in pairs:
        if after.start_ns + _slack_ns(trace, after, before) < before.end_ns:
            raise AssertionError(
                f"{_named(after)} started before {_named(before)} had ended, on the "
                f"{after.row.kind} {after.row.name!r} and the {before.row.kind} {before.row.name!r}"
            )


def _runs(trace: Trace, *tasks: TaskRef) -> list[list[Span]]:
    """The runs of each task, by start."""
    on_stream = {span.task for span in trace.spans if span.row.kind == "stream"}
    found = []
    for name in names_of(tasks):
        kind = "stream" if name in on_stream else "thread"
        found.append([s for s in trace.spans if s.task == name and s.row.kind == kind])
        if not found[-1]:
            known = listed([*dict.fromkeys(span.task for span in trace.spans)])
            raise ValueError(f"the trace has no run of {name!r}; it has {known}")
    return found


def _meets(trace: Trace, one: Span, other: Span) -> bool:
    meet_ns = min(one.end_ns, other.end_ns) - max(one.start_ns, other.start_ns)
    return meet_ns > _slack_ns(trace, one, other)


def _slack_ns(trace: Trace, *spans: Span) -> int:
    """By how much the times of two spans may be off against each other.

    A device's are of single precision, and of half a microsecond; how they were put beside the
    host's is known to the trace.
    """
    on_streams = [span for span in spans if span.row.kind == "stream"]
    rounding_ns = max((1000 + (span.end_ns >> 22) for span in on_streams), default=0)
    return rounding_ns + (trace.clock_error_ns if len(on_streams) == 1 else 0)


def _named(span: Span) -> str:
    return f"{span.task!r} of iteration {span.iteration}"


def _told(causes: Causes, spans: list[Span]) -> str:
    """The most frequent reason why runs of a task start when they do, in words."""
    reasons = Counter(_reason(span, causes.of(span)) for span in spans)
    reason, count = reasons.most_common(1)[0]
    return f"{spans[0].task} {reason} ({count} of {len(spans)} runs)"


def _reason(span: Span, cause: Cause) -> str:
    if cause.span is None:
        return "starts with the trace"
    step = cause.span.iteration - span.iteration
    before = f"{cause.span.task} i{step:+d}" if step else f"{cause.span.task} i"
    if cause.why == "row":
        return f"i starts when its {span.row.kind} {span.row.name!r} is done with {before}"
    if cause.why == "queued":
        return "i starts when its thread has queued it"
    return f"i starts when {before} is done, on which it depends"
