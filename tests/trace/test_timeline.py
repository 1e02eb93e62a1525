"""The picture shows rows, boxes and names, or says what it lacks."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from swpipe.trace import Trace, plot_stacked
from swpipe.trace.span import Panel, Row, Span
from swpipe.trace.timeline import COLORS, plot

MS = 1_000_000
IO = Row("thread", "io")
DEFAULT = Row("thread", "default")
MEMCPY = Row("stream", "memcpy")
READS = [Span("read", i, IO, 10 * i * MS, (10 * i + 9) * MS) for i in range(4)]
TRAINS = [
    Span("train", i, DEFAULT, (10 * i + 10) * MS, (10 * i + 15) * MS, wait_ns=5 * MS)
    for i in range(4)
]
COPIES = [Span("copy", i, MEMCPY, (10 * i + 9) * MS, (10 * i + 10) * MS) for i in range(4)]


def svg(path: Path, spans: list[Span], title: str | None = None) -> str:
    """Return the source of the picture."""
    return svg_of(path, [Panel("", spans)], title)


def svg_of(path: Path, panels: list[Panel], title: str | None = None) -> str:
    """Return the source of a picture of several timelines."""
    pytest.importorskip("matplotlib")
    plot(panels, path / "timeline.svg", title=title)
    return (path / "timeline.svg").read_text(encoding="utf-8")


def texts(source: str) -> list[str]:
    """Return all text in an SVG picture."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", source)


def test_traces_are_stacked(tmp_path: Path) -> None:
    """Each has its heading and rows, starts at 0, and names its streams and its threads."""
    pytest.importorskip("matplotlib")
    later = [replace(s, start_ns=s.start_ns + 900 * MS, end_ns=s.end_ns + 900 * MS) for s in READS]
    heights = []
    for traces in ({"predicted": Trace(READS)}, {"a": Trace(later), "b": Trace([*READS, *COPIES])}):
        plot_stacked(traces, tmp_path / "both.svg")
        source = (tmp_path / "both.svg").read_text()
        heights.append(float(re.findall(r'height="([\d.]+)pt"', source)[0]))
    written = texts(source)
    assert {"a", "b", "stream memcpy", "30"} <= {*written}
    assert written.index("a") < written.index("b")
    assert (written.count("io"), written.count("read")) == (2, 8)
    assert "900" not in written
    assert heights[0] < heights[1]


def test_rows_boxes_and_the_axis_are_named(tmp_path: Path) -> None:
    """A box has its task and iteration, and the axis counts milliseconds."""
    written = texts(svg(tmp_path, [*READS, *TRAINS], title="Two threads"))
    assert {"io", "default", "read", "train", "3", "0 ms", "20", "Two threads"} <= set(written)
    assert written.count("read") == 4
    Trace(READS).plot(tmp_path / "timeline.png")
    head = (tmp_path / "timeline.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(head[16:20]) == 2000


def test_each_iteration_has_its_colour(tmp_path: Path) -> None:
    """It is the same on every row; a legend names it unless a colour stands for two."""
    source = svg(tmp_path, [*READS, *TRAINS])
    assert [colour for colour in COLORS if colour.lower() in source] == list(COLORS[:4])
    assert "iteration 3" in texts(source)
    many = [Span("read", i, IO, i * MS, (i + 1) * MS) for i in range(len(COLORS) + 1)]
    assert "iteration 0" not in texts(svg(tmp_path, many))


def test_waits_are_hatched(tmp_path: Path) -> None:
    """A legend explains this only if it occurs."""
    plain = svg(tmp_path, READS)
    assert "<pattern" not in plain
    assert "waiting" not in texts(plain)
    source = svg(tmp_path, TRAINS)
    assert "<pattern" in source
    assert "waiting" in texts(source)


def test_other_iterations_of_a_window_are_drawn_too(tmp_path: Path) -> None:
    """In their own colours, as far as they lie within it."""
    pytest.importorskip("matplotlib")
    trace = Trace([*READS, *TRAINS]).window(1, 1)
    trace.plot(tmp_path / "window.svg")
    written = texts((tmp_path / "window.svg").read_text())
    assert {"iteration 0", "iteration 1", "iteration 2"} <= {*written}
    assert "iteration 3" not in written
    assert max(span.end_ns for span in trace.beside) == 25 * MS
    assert "train 0" in trace.format()


def test_a_name_that_does_not_fit_is_upright_or_gives_way(tmp_path: Path) -> None:
    """It gives way to the iteration; if not even that fits, the box stays empty."""
    spans = [
        Span("a_long_name", 1, IO, 0, 600 * MS),
        Span("a_long_name_of_a_task", 2, IO, 600 * MS, 630 * MS),
        Span("upright", 5, IO, 630 * MS, 650 * MS),
        Span("b", 300, IO, 650 * MS, 652 * MS),
        Span("c", 4, IO, 652 * MS, 1000 * MS),
    ]
    written = texts(svg(tmp_path, spans))
    assert {"a_long_name", "1", "2", "upright 5"} <= set(written)
    assert not {"a_long_name_of_a_task", "b", "300"} & set(written)


def test_admit_is_drawn_if_it_takes_time(tmp_path: Path) -> None:
    """A slow pull of the batch is visible; a quick one is not drawn."""
    quick = Span("<admit>", 1, DEFAULT, 18 * MS, 18 * MS + 10)
    slow = Span("<admit>", 1, DEFAULT, 15 * MS, 20 * MS)
    assert svg(tmp_path, [quick, *TRAINS]).count("<path") == svg(tmp_path, TRAINS).count("<path")
    assert "&lt;admit&gt;" in texts(svg(tmp_path, [slow, *TRAINS]))


def test_an_empty_picture_is_refused(tmp_path: Path) -> None:
    """No file is written."""
    with pytest.raises(ValueError, match="there are no spans"):
        Trace().plot(tmp_path / "timeline.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'swpipe\[plot\]'"):
        Trace(READS).plot(tmp_path / "timeline.png")
