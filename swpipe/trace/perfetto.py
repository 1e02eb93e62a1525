"""Timelines as JSON for chrome://tracing and the Perfetto UI.

    process 1 "thread groups"   one track per group: tasks, and the waits before them
    process 2 "streams"         one track per stream
    arrows                      from a task to a task on another thread that depends on it, on the
                                same iteration or a later one

Each task is a complete event (``"ph": "X"``) with its iteration and wait in ``args``. ``ts`` and
``dur`` are microseconds with three decimals, so spans keep their nanoseconds. The format is "Trace
Event Format" (Nick Duca and Dan Sinclair, Google, 2016).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swpipe.core.files import read_text, replacing, write_atomically
from swpipe.core.messages import shorten, shown
from swpipe.core.plan import MOST_ITERATIONS, PULL
from swpipe.core.resolved import ResolvedPlan
from swpipe.core.task import is_label, is_name
from swpipe.errors import PlanError
from swpipe.program import OWN, RETIRE
from swpipe.trace.span import Kind, Row, Span, rows_of

PROCESSES: dict[Kind, tuple[int, str]] = {"thread": (1, "thread groups"), "stream": (2, "streams")}
"""Kind of row to the number and name of its process."""

MOST_BYTES = 2**29
MOST_US = 1e18
"""The size of the largest file that is read, and the latest time in it."""

Event = dict[str, Any]


class Arrow(NamedTuple):
    """The dependence of ``consumer`` on iteration i on ``producer`` on i - ``distance``."""

    producer: str
    consumer: str
    distance: int = 0


def arrows_of(resolved: ResolvedPlan) -> tuple[Arrow, ...]:
    """Return the dependences of a plan, and that of ``<retire>`` on the pull of the same period."""
    found = [Arrow(dep.producer, dep.consumer, dep.distance) for dep in resolved.dependences]
    if resolved.plan.pull_group is not None:
        # The pull of a period is depth - 1 iterations ahead of the iteration that is retired in it.
        found.append(Arrow(PULL, RETIRE, 1 - resolved.plan.depth))
    return tuple(found)


def events_of(spans: Sequence[Span], arrows: Iterable[Arrow], shift_ns: int = 0) -> list[Event]:
    """Return the events of some spans, later by ``shift_ns``.

    Each event has the process and track of its row.
    """
    places: dict[Row, Event] = {
        row: {"pid": PROCESSES[row.kind][0], "tid": tid}
        for tid, row in enumerate(rows_of(spans), start=1)
    }
    events = [*_tracks(places), *_tasks(spans, places), *_flows(spans, arrows, places)]
    if shift_ns:
        # Events that name processes and tracks have no time.
        events = [{**e, "ts": e["ts"] + shift_ns / 1000} if "ts" in e else e for e in events]
    return events


def save(path: Path, spans: Sequence[Span], about: Mapping[str, Any]) -> None:
    """Write the file, compressed if its name ends in ``.gz``.

    Args:
        path: The file.
        spans: The spans to write.
        about: The other attributes of a ``Trace``.
    """
    events = events_of(spans, about["arrows"])
    other = {"producer": "swpipe", **about}
    _write(path, {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def add_to(path: Path, other: Path, spans: Sequence[Span], about: Mapping[str, Any]) -> None:
    """Write what torch.profiler has exported to ``other``, with these spans beside it.

    Raises:
        ValueError: ``other`` is something else.
    """
    document = json.loads(_read(other))
    given = document if isinstance(document, dict) else {}
    events = given.get("traceEvents")
    base_ns = given.get("baseTimeNanoseconds")
    if not isinstance(events, list) or not isinstance(base_ns, int):
        raise ValueError(
            f"{str(other)!r} is not a trace of torch.profiler: it has no traceEvents, or no "
            "baseTimeNanoseconds; give a file that export_chrome_trace() wrote"
        )
    # Both origins are in nanoseconds since 1970: torch.profiler's times count from base_ns.
    added = events_of(spans, about["arrows"], about["origin_ns"] - base_ns)
    _write(path, {**given, "traceEvents": events + added})


def _write(path: Path, document: Event) -> None:
    """Write a document as JSON, compressed if the name ends in ``.gz``."""
    text = json.dumps(document, separators=(",", ":"))
    if path.suffix == ".gz":
        with replacing(path) as temporary:
            # mtime=0: equal traces give equal files.
            temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        write_atomically(path, text)


def _read(path: Path) -> str:
    """Return the text of a file, compressed or not.

    Raises:
        ValueError: The file is too large, or cannot be read as text.
    """
    if path.suffix != ".gz":
        return read_text(path, MOST_BYTES)
    try:
        with gzip.open(path) as file:
            # One byte more shows that there is more, without unpacking a file that would fill the
            # memory.
            data = file.read(MOST_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{str(path)!r} is not a gzip file: {error}") from error
    if len(data) > MOST_BYTES:
        raise ValueError(f"{str(path)!r} has more than {MOST_BYTES} bytes of text")
    return data.decode()


def load(path: Path) -> dict[str, Any]:
    """Return the arguments of a ``Trace`` from a file that ``save`` wrote; see ``Trace.load``.

    Raises:
        ValueError: The file is not one that ``save`` wrote.
    """
    try:
        document = json.loads(_read(path))
        events = document["traceEvents"]
        other = document["otherData"]
        if other["producer"] != "swpipe":
            raise ValueError("another program's trace")
        kinds = {number: kind for kind, (number, _) in PROCESSES.items()}
        # Names of tracks are the only record of the rows: other events have numbers.
        rows = {
            (event["pid"], event["tid"]): Row(kinds[event["pid"]], event["args"]["name"])
            for event in events
            if event["name"] == "thread_name"
        }
        tasks = (event for event in events if event.get("cat") == "task")
        ns = {
            name: _count(other.get(name, 0), "time in nanoseconds")
            for name in ("origin_ns", "clock_error_ns")
        }
        spans = [_span(event, rows[event["pid"], event["tid"]]) for event in tasks]
        return {"spans": spans, "arrows": tuple(map(_arrow, other["arrows"])), **ns}
    # Files come from anywhere: whatever is wrong in one ends in the same error, with its cause.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # PlanError is a ValueError whose text has several lines.
        said = error.in_one_line if isinstance(error, PlanError) else shorten(str(error))
        raise ValueError(
            f"{str(path)!r} is not a timeline that swpipe saved ({type(error).__name__}: {said}); "
            "files that Trace.save() or --timeline wrote can be loaded"
        ) from error


def _span(event: Event, row: Row) -> Span:
    """Return the span of an event, with all of its values checked."""
    about = event["args"]
    start_ns, duration_ns, wait_ns = map(_ns, (event["ts"], event["dur"], about["wait_us"]))
    iteration = _count(about["iteration"], "iteration")
    if not isinstance(row.name, str) or not is_label(row.name):
        raise ValueError(f"{shown(row.name)} is no thread group or stream")
    if duration_ns < 0 or wait_ns < 0:
        raise ValueError("a time from start to end, or a wait, is negative")
    return Span(_task(event["name"]), iteration, row, start_ns, start_ns + duration_ns, wait_ns)


def _task(name: object) -> str:
    """Return a task's name, or raise ValueError."""
    if isinstance(name, str) and (is_name(name) or name in OWN):
        return name
    raise ValueError(f"{shown(name)} is no task")


def _arrow(data: Sequence[Any]) -> Arrow:
    """Return the arrow that three values stand for, or raise ValueError."""
    producer, consumer, distance = data
    if type(distance) is not int or abs(distance) > MOST_ITERATIONS:
        raise ValueError(f"{shown(distance)} is no distance")
    return Arrow(_task(producer), _task(consumer), distance)


def _count(value: Any, what: str) -> int:
    """Return an integer of 0 or more, or raise ValueError."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{shown(value)} is no {what}")
    return value


def _ns(us: float) -> int:
    """Return microseconds as nanoseconds, or raise ValueError."""
    if not abs(us) <= MOST_US:  # also refuses nan
        raise ValueError(f"{shown(us)} is no time in microseconds")
    return round(us * 1000)


def _tracks(places: Mapping[Row, Event]) -> Iterator[Event]:
    """Yield the events that name and sort processes and tracks."""
    # Metadata events ("M") name the tracks, and sort them like the rows of a picture.
    kinds = sorted({PROCESSES[row.kind] for row in places})
    tracks = [("process", {"pid": number}, name, number) for number, name in kinds]
    tracks += [("thread", place, row.name, place["tid"]) for row, place in places.items()]
    for what, place, name, index in tracks:
        yield {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": f"{what}_sort_index", **place, "args": {"sort_index": index}}


def _tasks(spans: Sequence[Span], places: Mapping[Row, Event]) -> Iterator[Event]:
    """Yield the events of spans and of the waits before them."""
    for span in spans:
        wait_us = span.wait_ns / 1000
        place = places[span.row]
        about: Event = {"iteration": span.iteration}
        # The wait is an event of its own, before the task's.
        if span.wait_ns:
            times = {"ts": (span.start_ns - span.wait_ns) / 1000, "dur": wait_us}
            yield {"ph": "X", "cat": "wait", "name": "wait", "args": about, **times, **place}
        times = {"ts": span.start_ns / 1000, "dur": span.duration_ns / 1000}
        about = {**about, "wait_us": wait_us}
        yield {"ph": "X", "cat": "task", "name": span.task, "args": about, **times, **place}


def _flows(
    spans: Sequence[Span], arrows: Iterable[Arrow], places: Mapping[Row, Event]
) -> Iterator[Event]:
    """Yield the start and end events of arrows between tasks on different threads."""
    runs = {(span.task, span.iteration): span for span in spans if span.row.kind == "thread"}
    iterations = sorted({span.iteration for span in spans})
    ends = [
        (runs[producer, i - distance], runs[consumer, i])
        for producer, consumer, distance in arrows
        for i in iterations
        if (producer, i - distance) in runs and (consumer, i) in runs
    ]
    for number, (before, after) in enumerate(ends, start=1):
        # Arrows within a row, or back in time, would only hide the others.
        if before.row != after.row and before.end_ns <= after.start_ns:
            flow = {"cat": "dependence", "name": "dependence", "id": number}
            # An arrow starts at the slice that is open at its time, so 1 ns before the end.
            start_ns = max(before.start_ns, before.end_ns - 1)
            yield {"ph": "s", **flow, **places[before.row], "ts": start_ns / 1000}
            yield {"ph": "f", "bp": "e", **flow, **places[after.row], "ts": after.start_ns / 1000}
