"""The saved file has the format of chrome://tracing and the Perfetto UI, and loads unchanged."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swpipe import SWPipeline
from swpipe.trace import Trace
from swpipe.trace.perfetto import Arrow
from swpipe.trace.span import Row, Span
from tests.support.plans_for_tests import spread, tasks

US = 1_000
IO = Row("thread", "io")
DEFAULT = Row("thread", "default")
MEMCPY = Row("stream", "memcpy")
TRACE = Trace(
    [
        Span("h2d", 0, IO, 10 * US, 30 * US),
        Span("h2d", 0, MEMCPY, 12 * US, 40 * US),
        Span("forward", 0, DEFAULT, 45 * US, 60 * US, wait_ns=25 * US),
        Span("step", 0, DEFAULT, 60 * US, 61 * US + 1),
        Span("h2d", 1, IO, 35 * US, 50 * US, wait_ns=1),
    ],
    arrows=[Arrow("h2d", "forward"), Arrow("forward", "step")],
)


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    """Return the events of a saved trace."""
    TRACE.save(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert document["displayTimeUnit"] == "ms"
    return list(document["traceEvents"])


def of(events: list[dict[str, Any]], **wanted: str) -> list[dict[str, Any]]:
    """Return the events that have these fields."""
    return [event for event in events if wanted.items() <= event.items()]


def track(events: list[dict[str, Any]], process: str, name: str) -> tuple[int, int]:
    """Return process and thread number of a row."""
    (pid,) = (e["pid"] for e in of(events, name="process_name") if e["args"]["name"] == process)
    (tid,) = (
        e["tid"]
        for e in of(events, name="thread_name")
        if (e["pid"], e["args"]["name"]) == (pid, name)
    )
    return pid, tid


def test_a_task_is_a_complete_event_in_microseconds(events: list[dict[str, Any]]) -> None:
    """It has its process and thread, and the iteration and wait as arguments."""
    (event,) = of(events, ph="X", name="forward")
    pid, tid = track(events, "thread groups", "default")
    assert event == {
        "ph": "X",
        "cat": "task",
        "name": "forward",
        "pid": pid,
        "tid": tid,
        "ts": 45.0,
        "dur": 15.0,
        "args": {"iteration": 0, "wait_us": 25.0},
    }
    waits = of(events, ph="X", cat="wait")  # each before its task
    assert [(e["ts"], e["dur"]) for e in waits] == [(34.999, 0.001), (20.0, 25.0)]
    assert (waits[1]["pid"], waits[1]["tid"]) == (pid, tid)


def test_threads_and_streams_are_processes_with_named_tracks(
    events: list[dict[str, Any]],
) -> None:
    """Each track has its own number, and they are sorted as a batch passes through them."""
    tracks = [
        track(events, "thread groups", "io"),
        track(events, "thread groups", "default"),
        track(events, "streams", "memcpy"),
    ]
    order = {
        (e["pid"], e["tid"]): e["args"]["sort_index"] for e in of(events, name="thread_sort_index")
    }
    assert len(set(tracks)) == 3
    assert sorted(order, key=lambda place: order[place]) == tracks


def test_arrows_lead_from_thread_to_thread(events: list[dict[str, Any]]) -> None:
    """They lead from inside one slice to the other; within a track there are none."""
    (leaves,) = of(events, ph="s")
    (arrives,) = of(events, ph="f")
    assert leaves["id"] == arrives["id"]
    assert (leaves["pid"], leaves["tid"]) == track(events, "thread groups", "io")
    assert (arrives["pid"], arrives["tid"]) == track(events, "thread groups", "default")
    assert 10.0 <= leaves["ts"] < 30.0
    assert (arrives["ts"], arrives["bp"]) == (45.0, "e")


def test_an_arrow_leads_to_a_later_iteration(tmp_path: Path) -> None:
    """It follows the plan's dependence; an arrow to a slice without an end is not drawn."""
    spans = [
        Span("step", 0, DEFAULT, 0, 10 * US),
        Span("read", 1, IO, 5 * US, 8 * US),
        Span("read", 2, IO, 20 * US, 30 * US),
    ]
    arrows = (Arrow("step", "read", 2), Arrow("step", "read", 1))
    Trace(spans, arrows=arrows).save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["ts"] for e in events if e.get("cat") == "dependence"] == [9.999, 20.0]


def test_every_event_has_the_fields_that_its_phase_needs(tmp_path: Path) -> None:
    """This includes recorded traces; slices of one track never overlap."""
    with SWPipeline(spread(), tasks(), device="cpu") as pipe, pipe.trace() as trace:
        pipe.run(range(5))
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    needs = {
        "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
        "M": {"name", "pid", "args"},
        "s": {"name", "cat", "id", "ts", "pid", "tid"},
        "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    }
    assert {event["ph"] for event in events} == set(needs)
    assert all(needs[event["ph"]] <= event.keys() for event in events)
    reached: dict[int, int] = {}
    for event in sorted(of(events, ph="X"), key=lambda e: (e["ts"], e["dur"])):
        start_ns = round(event["ts"] * US)
        assert start_ns >= reached.get(event["tid"], 0)
        reached[event["tid"]] = start_ns + round(event["dur"] * US)


def test_what_was_saved_is_loaded_to_the_nanosecond(tmp_path: Path) -> None:
    """Times far from the origin are exact, and a second save gives the same file."""
    far = Span("late", 9, IO, 86_400 * 10**9 + 1, 86_400 * 10**9 + 12_345, wait_ns=678)
    trace = Trace([*TRACE.spans, far], arrows=TRACE.arrows)
    trace.save(tmp_path / "one.json")
    loaded = Trace.load(tmp_path / "one.json")
    assert (loaded.spans, loaded.arrows) == (trace.spans, trace.arrows)
    loaded.save(tmp_path / "two.json")
    assert (tmp_path / "two.json").read_bytes() == (tmp_path / "one.json").read_bytes()


def test_a_compressed_file_is_the_same_trace(tmp_path: Path) -> None:
    """It is small: the Perfetto UI reads it directly."""
    many = [replace(span, iteration=i) for i in range(200) for span in TRACE.spans]
    trace = Trace(many, arrows=TRACE.arrows)
    trace.save(tmp_path / "plain.json")
    trace.save(tmp_path / "small.json.gz")
    loaded = Trace.load(tmp_path / "small.json.gz")
    assert (loaded.spans, loaded.arrows) == (trace.spans, trace.arrows)
    sizes = [(tmp_path / name).stat().st_size for name in ("plain.json", "small.json.gz")]
    assert sizes[1] < sizes[0] / 10
    assert sizes[0] / len(many) < 260


OTHER = '{"traceEvents": [%s], "otherData": {"producer": "%s", "arrows": []}}'


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("other.json", b""),
        ("other.json", b"[]"),
        ("other.json", b"{}"),
        ("other.json", b'{"traceEvents": []}'),
        ("other.json", (OTHER % ("", "another")).encode()),
        ("other.json", (OTHER % ('{"cat": "task"}', "swpipe")).encode()),
        ("other.json", (OTHER % ("7", "swpipe")).encode()),
        ("other.json.gz", b""),
        ("other.json.gz", b"{}"),
        ("other.json.gz", b"\x1f\x8b\x08"),
        ("other.json.gz", gzip.compress(b"{}", mtime=0)[:-9]),
    ],
)
def test_another_file_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    """The error names the file."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name}' is not a timeline that swpipe saved"):
        Trace.load(tmp_path / name)
