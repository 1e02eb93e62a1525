"""Whatever a timeline contains: it is read and drawn, or refused with a short message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings

from swpipe.trace import Trace
from tests.support.hostile import check_message, edited, replaced

QUICK = 25
SLOW = 250

TASK = {"ph": "X", "cat": "task", "pid": 1, "tid": 1}
ROW = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "default"}}
SAVED = {
    "traceEvents": [
        ROW,
        {**TASK, "name": "a", "args": {"iteration": 0, "wait_us": 0.5}, "ts": 1.5, "dur": 2},
        {**TASK, "name": "b", "args": {"iteration": 1, "wait_us": 0.0}, "ts": 9.0, "dur": 3},
    ],
    "otherData": {"producer": "swpipe", "arrows": [["a", "b", 0]]},
}


def read(text: str, folder: Path) -> None:
    """Load a timeline; what can be loaded can be shown and saved."""
    path = folder / "timeline.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        trace = Trace.load(path)
    except ValueError as error:
        check_message(error)
        return
    trace.save(path)
    if trace.spans:
        for shown in (trace.format(), trace.format_summary()):
            assert shown.replace("\n", "").isprintable()


def test_a_timeline_is_read(tmp_path: Path) -> None:
    """The one that the others are made from."""
    (tmp_path / "timeline.json").write_text(json.dumps(SAVED))
    assert len(Trace.load(tmp_path / "timeline.json").spans) == 2


@given(text=replaced(SAVED) | edited(json.dumps(SAVED)))
@settings(max_examples=QUICK)
def test_a_timeline_of_any_values_is_read_or_refused(text: str, tmp_path: Path) -> None:
    """Infinite times, strange names, deep lists, text cut anywhere."""
    read(text, tmp_path)


@pytest.mark.slow
@given(text=replaced(SAVED) | edited(json.dumps(SAVED)))
@settings(max_examples=SLOW)
def test_many_more_timelines_are_read_or_refused(text: str, tmp_path: Path) -> None:
    """The same, longer."""
    read(text, tmp_path)


@pytest.mark.parametrize("iteration", ['"1"', "1.5", "-1", "true", "null", "1" + "0" * 400])
def test_an_iteration_is_a_number_from_0(tmp_path: Path, iteration: str) -> None:
    """Others could be neither sorted nor drawn."""
    event = {**TASK, "name": "a", "args": {"iteration": "HERE", "wait_us": 0}, "ts": 1, "dur": 2}
    document = json.dumps({**SAVED, "traceEvents": [ROW, event]})
    (tmp_path / "timeline.json").write_text(document.replace('"HERE"', iteration))
    with pytest.raises(ValueError, match="is no iteration") as caught:
        Trace.load(tmp_path / "timeline.json")
    check_message(caught.value)


@pytest.mark.parametrize("time", ["Infinity", "-Infinity", "NaN", "1e999", "1" + "0" * 4000, '"1"'])
@pytest.mark.parametrize("key", ["ts", "dur", "wait_us"])
def test_a_time_is_a_number_of_microseconds(tmp_path: Path, key: str, time: str) -> None:
    """Infinite and endless ones once ended in an OverflowError."""
    path = tmp_path / "timeline.json"
    event = {**TASK, "name": "a", "args": {"iteration": 0, "wait_us": 0.5}, "ts": 1.5, "dur": 2}
    (event["args"] if key == "wait_us" else event)[key] = "HERE"  # type: ignore[index]
    document = json.dumps({**SAVED, "traceEvents": [ROW, event]})
    path.write_text(document.replace('"HERE"', time))
    with pytest.raises(ValueError, match="is not a timeline that swpipe saved") as caught:
        Trace.load(path)
    check_message(caught.value)
