"""The charts of a report, as elements of its page.

With plotly they answer to the mouse: zoom, and figures where it points. Its script goes into the
page once. Without it they are pictures that matplotlib draws; without either, text.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from swpipe._engine.program import OWN
from swpipe.core.pictures import COLORS
from swpipe.profiler import ProfileResult
from swpipe.profiler.plot import Bars, bar_chart_svg
from swpipe.profiler.spread import Estimate
from swpipe.trace import Trace, format_stacked, svg_stacked
from swpipe.trace.chart import label
from swpipe.trace.span import Panel, Span, extent_ns

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Figure

SHOWN = 4
"""Iterations that a timeline shows at first."""

_FONT = "system-ui, sans-serif"
_KNOWN, _UNKNOWN = COLORS[0], "#C4C4C4"
_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "scrollZoom": True,
    "modeBarButtonsToRemove": ["lasso2d", "select2d"],
}
_LAYOUT: dict[str, Any] = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": _FONT, "size": 12},
    "margin": {"l": 10, "r": 10, "t": 30, "b": 40},
    "barmode": "overlay",
    "template": "none",
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#999", "activecolor": "#1a5fb4"},
}
_ROW_PX, _FRAME_PX = 52, 90


def script() -> str:
    """The script that the charts need; "" for none."""
    if find_spec("plotly") is None:
        return ""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def exposed_chart(profile: ProfileResult) -> str:
    """Bars with intervals: what an iteration would save if a task cost nothing."""
    if find_spec("plotly") is None:
        try:
            return bar_chart_svg([Bars("", profile.exposed_s, profile.spread_s)])
        except ModuleNotFoundError:
            return ""  # the table has the same figures
    from plotly.graph_objects import Bar, Figure

    spread_s = profile.spread_s
    values = [(1e3 * profile.exposed_s[name], 1e3 * s) for name, s in spread_s.items()]
    figure = Figure(
        Bar(
            x=[value for value, _ in values],
            y=[
                f"{html.escape(n)}  {Estimate(profile.raw_s[n], s).text}"
                for n, s in profile.spread_s.items()
            ],
            orientation="h",
            error_x={
                "array": [error for _, error in values],
                "arrayminus": list(map(min, *zip(*values, strict=True))),
                "color": "#888",
                "thickness": 1.2,
            },
            marker={"color": [_KNOWN if value > error else _UNKNOWN for value, error in values]},
            hovertemplate="%{y} ms<extra></extra>",
        )
    )
    figure.update_layout(**_LAYOUT, height=_FRAME_PX + 28 * len(values), showlegend=False)
    figure.update_xaxes(title="ms per iteration", rangemode="tozero", zeroline=False)
    figure.update_yaxes(autorange="reversed", automargin=True, ticks="", fixedrange=True)
    return _element(figure, "exposed")


def timeline_chart(traces: Mapping[str, Trace]) -> str:
    """Timelines below each other on one scale, each with its heading; the whole of each is there.

    The first iterations to be seen are ``Trace.steady(SHOWN)``.
    """
    shown = {heading: trace.steady(SHOWN) for heading, trace in traces.items()}
    if find_spec("plotly") is None:
        try:
            return svg_stacked(shown)
        except ImportError:
            return f"<pre>{html.escape(format_stacked(shown))}</pre>"
    from plotly.subplots import make_subplots

    rows = [len({span.row for span in trace.spans}) for trace in traces.values()]
    figure = make_subplots(
        rows=len(traces),
        cols=1,
        shared_xaxes=True,
        row_heights=[count / sum(rows) for count in rows],
        vertical_spacing=26 / (_FRAME_PX + _ROW_PX * sum(rows)),
        subplot_titles=[html.escape(heading) for heading in traces],
    )
    end_ms = 0.0
    for number, (heading, trace) in enumerate(traces.items(), 1):
        begin_ns, last_ns = extent_ns(shown[heading].spans)
        end_ms = max(end_ms, (last_ns - begin_ns) / 1e6)
        panel = Panel(heading, trace.spans)
        for bar in _bars(panel, begin_ns):
            figure.add_trace(bar, row=number, col=1)
        names = [html.escape(label(row)) for row in panel.by_row()]
        figure.update_yaxes(
            {"categoryorder": "array", "categoryarray": names[::-1], "fixedrange": True},
            automargin=True,
            ticks="",
            row=number,
            col=1,
        )
    figure.update_layout(
        **_LAYOUT,
        height=_FRAME_PX + _ROW_PX * sum(rows),
        uniformtext={"mode": "hide", "minsize": 9},
        showlegend=False,
        dragmode="pan",
    )
    figure.update_xaxes(range=[0, end_ms], ticksuffix=" ms", showgrid=True, zeroline=False)
    figure.update_annotations(x=0, xanchor="left", font={"size": 12})
    return _element(figure, "timeline")


def _bars(panel: Panel, begin_ns: int) -> Iterator[Bar]:
    """The spans in the colors of their iterations, and the waits before them."""
    from plotly.graph_objects import Bar

    spans = [span for span in panel.spans if span.task not in OWN or span.duration_ns > 20_000]
    waits = [span for span in spans if span.wait_ns > 20_000]
    yield Bar(
        x=[span.wait_ns / 1e6 for span in waits],
        base=[(span.start_ns - span.wait_ns - begin_ns) / 1e6 for span in waits],
        y=[html.escape(label(span.row)) for span in waits],
        orientation="h",
        width=0.4,
        marker={"color": "rgba(0,0,0,0)", "pattern": {"shape": "/", "fgcolor": "#999", "size": 6}},
        hovertext=[
            f"waits {span.wait_ns / 1e6:.3f} ms for its turn: {_name(span)}" for span in waits
        ],
        hoverinfo="text",
    )
    yield Bar(
        x=[span.duration_ns / 1e6 for span in spans],
        base=[(span.start_ns - begin_ns) / 1e6 for span in spans],
        y=[html.escape(label(span.row)) for span in spans],
        orientation="h",
        width=0.86,
        marker={
            "color": [COLORS[span.iteration % len(COLORS)] for span in spans],
            "line": {"color": "white", "width": 1},
        },
        text=[f"{html.escape(span.task)}<br>{span.iteration}" for span in spans],
        textposition="inside",
        insidetextanchor="middle",
        textfont={"color": "#222", "size": 11},
        textangle=0,
        hovertext=[
            f"{_name(span)}: {span.duration_ns / 1e6:.3f} ms"
            + (f", after a wait of {span.wait_ns / 1e6:.3f} ms" if span.wait_ns > 1_000 else "")
            for span in spans
        ],
        hoverinfo="text",
    )


def _name(span: Span) -> str:
    return f"{html.escape(span.task)} of iteration {span.iteration}"


def _element(figure: Figure, name: str) -> str:
    return str(
        figure.to_html(
            full_html=False, include_plotlyjs=False, div_id=f"swpipe-{name}", config=_CONFIG
        )
    )
