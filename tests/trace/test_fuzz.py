"""Any timeline is read and drawn, or refused with a short message."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given

from swpipe.trace import Trace
from tests.support.budget import examples
from tests.support.hostile import check_message, edited, replaced

EXAMPLES = 60

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
    """Load a timeline; any loaded one can be shown and saved."""
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


@examples("files", EXAMPLES)
@given(text=replaced(SAVED) | edited(json.dumps(SAVED)))
def test_a_timeline_of_any_values_is_read_or_refused(text: str, tmp_path: Path) -> None:
    """These are infinite times, strange names, deep lists, text cut anywhere."""
    read(text, tmp_path)


HUGE = "1" + "0" * 4000
TIMES = ("Infinity", "-Infinity", "NaN", "1e999", HUGE, '"1"')
ITERATIONS = ('"1"', "1.5", "-1", "true", "null", HUGE)


@pytest.mark.parametrize("key", ["ts", "dur", "wait_us", "iteration"])
def test_a_number_that_is_none_is_refused(tmp_path: Path, key: str) -> None:
    """Infinite and endless ones once ended in an OverflowError; the file itself can be read."""
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(SAVED))
    assert len(Trace.load(path).spans) == 2
    text = re.sub(rf'"{key}": [\d.]+', f'"{key}": HERE', json.dumps(SAVED))
    for number in ITERATIONS if key == "iteration" else TIMES:
        path.write_text(text.replace("HERE", number))
        with pytest.raises(ValueError, match="is not a timeline that swpipe saved") as caught:
            Trace.load(path)
        check_message(caught.value)
