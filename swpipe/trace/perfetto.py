"""Write and read timelines as JSON for chrome://tracing and the Perfetto UI.

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

from swpipe._engine.program import OWN, RETIRE
from swpipe.core.files import read_text, replacing, write_atomically
from swpipe.core.messages import shorten, shown
from swpipe.core.plan import MOST_ITERATIONS, PULL
from swpipe.core.resolved import ResolvedPlan
from swpipe.core.task import is_label, is_name
from swpipe.errors import PlanError
from swpipe.trace.span import Kind, Row, Span, rows_of

PROCESSES: dict[Kind, tuple[int, str]] = {"thread": (1, "thread groups"), "stream": (2, "streams")}
"""Kind of row to the number and name of its process."""

MOST_BYTES, MOST_US = 2**29, 1e18
"""The size of the largest file that is read, and the latest time in it."""

Event = dict[str, Any]


class Arrow(NamedTuple):
    """``consumer`` on iteration i depends on ``producer`` on iteration i - ``distance``."""

    producer: str
    consumer: str
    distance: int = 0


def arrows_of(resolved: ResolvedPlan) -> tuple[Arrow, ...]:
    """The dependences of a plan; and ``<retire>`` waits for the pull of the same period."""
    found = [Arrow(dep.producer, dep.consumer, dep.distance) for dep in resolved.dependences]
    if resolved.plan.pull_group is not None:
        found.append(Arrow(PULL, RETIRE, 1 - resolved.plan.depth))
    return tuple(found)


def events_of(spans: Sequence[Span], arrows: Iterable[Arrow], shift_ns: int = 0) -> list[Event]:
    """The events, later by ``shift_ns``; each has the process and track of its row."""
    places: dict[Row, Event] = {
        row: {"pid": PROCESSES[row.kind][0], "tid": tid}
        for tid, row in enumerate(rows_of(spans), start=1)
    }
    events = [*_tracks(places), *_tasks(spans, places), *_flows(spans, arrows, places)]
    if shift_ns:
        events = [{**e, "ts": e["ts"] + shift_ns / 1000} if "ts" in e else e for e in events]
    return events


def save(path: Path, spans: Sequence[Span], about: Mapping[str, Any]) -> None:
    """Write the file, compressed if its name ends in ``.gz``.

    Args:
        path: The file.
        spans: What to write.
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
    events, base_ns = given.get("traceEvents"), given.get("baseTimeNanoseconds")
    if not isinstance(events, list) or not isinstance(base_ns, int):
        raise ValueError(
            f"{str(other)!r} is not a trace of torch.profiler: it has no traceEvents, or no "
            "baseTimeNanoseconds; give a file that export_chrome_trace() wrote"
        )
    added = events_of(spans, about["arrows"], about["origin_ns"] - base_ns)
    _write(path, {**given, "traceEvents": events + added})


def _write(path: Path, document: Event) -> None:
    text = json.dumps(document, separators=(",", ":"))
    if path.suffix == ".gz":
        with replacing(path) as temporary:
            temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        write_atomically(path, text)


def _read(path: Path) -> str:
    """The text of a file, compressed or not.

    Raises:
        ValueError: It is too large, or cannot be read as text.
    """
    if path.suffix != ".gz":
        return read_text(path, MOST_BYTES)
    try:
        with gzip.open(path) as file:
            data = file.read(MOST_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{str(path)!r} is not a gzip file: {error}") from error
    if len(data) > MOST_BYTES:
        raise ValueError(f"{str(path)!r} has more than {MOST_BYTES} bytes of text")
    return data.decode()


def load(path: Path) -> dict[str, Any]:
    """The arguments of a ``Trace``, from a file that ``save`` wrote; see ``Trace.load``."""
    try:
        document = json.loads(_read(path))
        events, other = document["traceEvents"], document["otherData"]
        if other["producer"] != "swpipe":
            raise ValueError("another program's trace")
        kinds = {number: kind for kind, (number, _) in PROCESSES.items()}
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
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        said = error.in_one_line if isinstance(error, PlanError) else shorten(str(error))
        raise ValueError(
            f"{str(path)!r} is not a timeline that swpipe saved ({type(error).__name__}: {said}); "
            "files that Trace.save() or --timeline wrote can be loaded"
        ) from error


def _span(event: Event, row: Row) -> Span:
    about = event["args"]
    start_ns, duration_ns, wait_ns = map(_ns, (event["ts"], event["dur"], about["wait_us"]))
    iteration = _count(about["iteration"], "iteration")
    if not isinstance(row.name, str) or not is_label(row.name):
        raise ValueError(f"{shown(row.name)} is no thread group or stream")
    if duration_ns < 0 or wait_ns < 0:
        raise ValueError("a time from start to end, or a wait, is negative")
    return Span(_task(event["name"]), iteration, row, start_ns, start_ns + duration_ns, wait_ns)


def _task(name: object) -> str:
    if isinstance(name, str) and (is_name(name) or name in OWN):
        return name
    raise ValueError(f"{shown(name)} is no task")


def _arrow(data: Sequence[Any]) -> Arrow:
    producer, consumer, distance = data
    if type(distance) is not int or abs(distance) > MOST_ITERATIONS:
        raise ValueError(f"{shown(distance)} is no distance")
    return Arrow(_task(producer), _task(consumer), distance)


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{shown(value)} is no {what}")
    return value


def _ns(us: float) -> int:
    if not abs(us) <= MOST_US:  # as nan
        raise ValueError(f"{shown(us)} is no time in microseconds")
    return round(us * 1000)


def _tracks(places: Mapping[Row, Event]) -> Iterator[Event]:
    kinds = sorted({PROCESSES[row.kind] for row in places})
    tracks = [("process", {"pid": number}, name, number) for number, name in kinds]
    tracks += [("thread", place, row.name, place["tid"]) for row, place in places.items()]
    for what, place, name, index in tracks:
        yield {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": f"{what}_sort_index", **place, "args": {"sort_index": index}}


def _tasks(spans: Sequence[Span], places: Mapping[Row, Event]) -> Iterator[Event]:
    for span in spans:
        wait_us, place = span.wait_ns / 1000, places[span.row]
        about: Event = {"iteration": span.iteration}
        if span.wait_ns:
            times = {"ts": (span.start_ns - span.wait_ns) / 1000, "dur": wait_us}
            yield {"ph": "X", "cat": "wait", "name": "wait", "args": about, **times, **place}
        times = {"ts": span.start_ns / 1000, "dur": span.duration_ns / 1000}
        about = {**about, "wait_us": wait_us}
        yield {"ph": "X", "cat": "task", "name": span.task, "args": about, **times, **place}


def _flows(
    spans: Sequence[Span], arrows: Iterable[Arrow], places: Mapping[Row, Event]
) -> Iterator[Event]:
    runs = {(span.task, span.iteration): span for span in spans if span.row.kind == "thread"}
    iterations = sorted({span.iteration for span in spans})
    ends = [
        (runs[producer, i - distance], runs[consumer, i])
        for producer, consumer, distance in arrows
        for i in iterations
        if (producer, i - distance) in runs and (consumer, i) in runs
    ]
    for number, (before, after) in enumerate(ends, start=1):
        if before.row != after.row and before.end_ns <= after.start_ns:
            flow = {"cat": "dependence", "name": "dependence", "id": number}
            # An arrow starts at the slice that is open at its time, so 1 ns before the end.
            start_ns = max(before.start_ns, before.end_ns - 1)
            yield {"ph": "s", **flow, **places[before.row], "ts": start_ns / 1000}
            yield {"ph": "f", "bp": "e", **flow, **places[after.row], "ts": after.start_ns / 1000}
