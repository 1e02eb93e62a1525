"""The chart shows for every cell what its row did in the middle of its time."""

from __future__ import annotations

import pytest

from swpipe.trace import Trace, format_stacked
from swpipe.trace.chart import chart
from swpipe.trace.span import Panel, Row, Span

MS = 1_000_000
IO = Row("thread", "io")
DEFAULT = Row("thread", "default")
MEMCPY = Row("stream", "memcpy")


def span(
    task: str, iteration: int, start_ms: float, end_ms: float, wait_ms: float = 0, row: Row = IO
) -> Span:
    """Return a span with its times in ms."""
    return Span(task, iteration, row, round(start_ms * MS), round(end_ms * MS), round(wait_ms * MS))


PIPELINE = [
    span("read", 0, 0, 10),
    span("read", 1, 10, 20),
    span("read", 2, 25, 35, wait_ms=5),
    span("train", 0, 10, 22, wait_ms=10, row=DEFAULT),
    span("train", 1, 22, 34, row=DEFAULT),
    span("copy", 0, 4, 7, row=MEMCPY),
    span("train", 2, 36, 40, row=DEFAULT),
]


def drawn(spans: list[Span], width: int = 100) -> str:
    """Return the chart of one timeline."""
    return chart([Panel("", spans)], width)


def line(spans: list[Span], cells: int = 20) -> str:
    """Return the cells of a chart with one row called ``io``."""
    first, *_ = drawn(spans, len("io  ") + cells).splitlines()
    return first.removeprefix("io  ")


def test_a_chart_has_a_line_per_row_and_a_time_axis() -> None:
    """Threads come first, in the order in which a batch passes through them, then streams."""
    assert drawn(PIPELINE, 60).splitlines() == [
        "io             ▌read 0████▌read 1▓▓▓▓░░░░░░▌read 2████",
        "default        ░░░░░░░░░░░▌train 0██████▌train 1▓▓▓▓▓  ▌tr 2",
        "stream memcpy      ▌0██",
        "               0 ms                                40.000 ms",
    ]


def test_names_are_cut_to_their_boxes() -> None:
    """First the task's name is shortened; then only the iteration is left, and at last the edge."""
    spans = [
        span("forward", 4, 0, 11),
        span("forward", 5, 11, 16),
        span("forward", 6, 16, 18),
        span("forward", 7, 18, 19),
        span("forward", 8, 19, 20),
    ]
    assert line(spans) == "▌forward 4█▌fo 5▌6▌▌"


def test_waiting_and_idling_look_different() -> None:
    """Waiting is shaded, and idle time is blank; a wait before the first start is cut off."""
    spans = [span("a", 0, 100, 105, wait_ms=50), span("a", 2, 115, 120, wait_ms=3)]
    assert line(spans) == "▌a 0█       ░░░▌a 2█"


@pytest.mark.parametrize(
    ("end_ms", "axis"),
    [(0.02, "0 ms        0.020 ms"), (37, "0 ms       37.000 ms"), (3e6, "0 ms  3000000.000 ms")],
)
def test_the_axis_ends_with_the_last_time(end_ms: float, axis: str) -> None:
    """In milliseconds, below the last cell."""
    assert drawn([span("a", 0, 0, end_ms)], 24).splitlines()[-1] == "    " + axis


def test_too_narrow_a_chart_is_refused() -> None:
    """The error tells the least width."""
    with pytest.raises(ValueError, match="width 30 is too narrow: these rows need 35 columns"):
        drawn(PIPELINE, 30)
    assert max(map(len, drawn(PIPELINE, 35).splitlines())) <= 35


def test_stacked_charts_share_one_scale() -> None:
    """Each begins at 0; one axis below serves both."""
    long = [span("a", 0, 0, 20)]
    short = [span("b", 7, 500, 510, row=DEFAULT)]
    stacked = format_stacked({"predicted": Trace(long), "measured": Trace(short)}, 29)
    assert stacked.splitlines() == [
        "predicted",
        "io       ▌a 0" + "█" * 16,
        "measured",
        "default  ▌b 7" + "▓" * 6,
        "         0 ms       20.000 ms",
    ]
