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

_FAULTS = (ValueError, LookupError, TypeError, AttributeError, RecursionError, EOFError)
"""What reading a file raises that has another content than a timeline."""


class Arrow(NamedTuple):
    """The dependence of ``consumer`` on iteration i on ``producer`` on i - ``distance``."""

    producer: str
    consumer: str
    distance: int = 0


def arrows_of(resolved: ResolvedPlan) -> tuple[Arrow, ...]:
    """Return the dependences of a plan, and that of ``<retire>`` on the pull of the same period."""
    arrows = [Arrow(dep.producer, dep.consumer, dep.distance) for dep in resolved.dependences]
    if resolved.plan.pull_group is not None:
        # The pull of a period is depth - 1 iterations ahead of the iteration that is retired in it.
        arrows.append(Arrow(PULL, RETIRE, 1 - resolved.plan.depth))
    return tuple(arrows)


def save(path: Path, spans: Sequence[Span], arrows: Sequence[Arrow]) -> None:
    """Write the file, compressed if its name ends in ``.gz``."""
    places: dict[Row, Event] = {
        row: {"pid": PROCESSES[row.kind][0], "tid": tid}
        for tid, row in enumerate(rows_of(spans), start=1)
    }
    events = [*_tracks(places), *_tasks(spans, places), *_flows(spans, arrows, places)]
    other = {"producer": "swpipe", "arrows": arrows}
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
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
    with gzip.open(path) as file:
        # One byte more shows that there is more, without unpacking a file that would fill the
        # memory.
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes of text")
    return data.decode()


def load(path: Path) -> tuple[list[Span], list[Arrow]]:
    """Return the spans and the arrows of a file that ``save`` wrote.

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
        spans = [_span(event, rows[event["pid"], event["tid"]]) for event in tasks]
        return spans, [*map(_arrow, other["arrows"])]
    # Files come from anywhere: whatever is wrong in one ends in the same error, with its cause.
    except (*_FAULTS, gzip.BadGzipFile, zlib.error) as error:
        # PlanError is a ValueError whose text has several lines.
        why = error.in_one_line if isinstance(error, PlanError) else shorten(str(error))
        raise ValueError(
            f"{str(path)!r} is not a timeline that swpipe saved ({type(error).__name__}: {why}); "
            "files that Trace.save() or --timeline wrote can be loaded"
        ) from error


def _span(event: Event, row: Row) -> Span:
    """Return the span of an event, with all of its values checked."""
    about = event["args"]
    start_ns, duration_ns, wait_ns = map(_ns, (event["ts"], event["dur"], about["wait_us"]))
    iteration = about["iteration"]
    _check(type(iteration) is int and 0 <= iteration < 2**63, iteration, "iteration")
    _check(isinstance(row.name, str) and is_label(row.name), row.name, "thread group or stream")
    _check(duration_ns >= 0 and wait_ns >= 0, (duration_ns, wait_ns), "length and wait")
    return Span(_task(event["name"]), iteration, row, start_ns, start_ns + duration_ns, wait_ns)


def _check(holds: bool, value: object, what: str) -> None:
    if not holds:
        raise ValueError(f"{shown(value)} is no {what}")


def _task(name: str) -> str:
    _check(isinstance(name, str) and (is_name(name) or name in OWN), name, "task")
    return name


def _arrow(data: Sequence[Any]) -> Arrow:
    producer, consumer, distance = data
    _check(type(distance) is int and abs(distance) <= MOST_ITERATIONS, distance, "distance")
    return Arrow(_task(producer), _task(consumer), distance)


def _ns(us: float) -> int:
    """Return microseconds as nanoseconds."""
    _check(abs(us) <= MOST_US, us, "time in microseconds")  # also refuses nan
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
    number = 0
    for producer, consumer, distance in arrows:
        for i in iterations:
            before = runs.get((producer, i - distance))
            after = runs.get((consumer, i))
            if before is None or after is None:
                continue
            # Arrows within a row, or back in time, would only hide the others.
            if before.row != after.row and before.end_ns <= after.start_ns:
                number += 1
                flow = {"cat": "dependence", "name": "dependence", "id": number}
                # An arrow starts at the slice that is open at its time, so 1 ns before the end.
                start_ns = max(before.start_ns, before.end_ns - 1)
                yield {"ph": "s", **flow, **places[before.row], "ts": start_ns / 1000}
                end_us = after.start_ns / 1000
                yield {"ph": "f", "bp": "e", **flow, **places[after.row], "ts": end_us}
