"""Traces: when each task ran on which thread group and stream; statistics, files, pictures."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, median

from swpipe._engine.program import RETIRE
from swpipe.trace import perfetto, timeline
from swpipe.trace.chart import chart, label
from swpipe.trace.perfetto import Arrow
from swpipe.trace.span import Panel, Row, Span, extent_ns, in_order, rows_of


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """The mean times of one task on one row: from start to end, and waiting before the start.

    On a thread, ``mean_s`` is the time the task blocks the host; on a stream, nothing waits.
    """

    task: str
    row: Row
    runs: int
    mean_s: float
    mean_wait_s: float


class Trace:
    """A record of when each task ran, from ``SWPipeline.trace`` or ``Trace.load``.

    Attributes:
        spans: The recorded spans, by start; empty until the ``with`` block of a recording ends.
        beside: Spans of other iterations in the same time; drawn in grey, not part of the record.
        arrows: Dependences within an iteration; saved with the spans.
    """

    def __init__(
        self,
        spans: Iterable[Span] = (),
        *,
        beside: Iterable[Span] = (),
        arrows: Iterable[Arrow] = (),
    ) -> None:
        self.spans = in_order(spans)
        self.beside = in_order(beside)
        self.arrows = tuple(arrows)

    def __repr__(self) -> str:
        iterations = len({span.iteration for span in self.spans})
        return f"<swpipe.Trace of {len(self.spans)} spans in {iterations} iterations>"

    def window(self, first_iteration: int, last_iteration: int) -> Trace:
        """The trace of some iterations, both ends included. Others in that time become ``beside``.

        Raises:
            ValueError: There is no span of these iterations.
        """
        wanted = [s for s in self.spans if first_iteration <= s.iteration <= last_iteration]
        if not wanted:
            have = sorted({span.iteration for span in self.spans})
            raise ValueError(
                f"iterations {first_iteration} to {last_iteration} are not in the trace, which has "
                + (f"{have[0]} to {have[-1]}" if have else "none")
            )
        begin_ns, end_ns = extent_ns(wanted)
        others = {*self.spans, *self.beside}.difference(wanted)
        beside = [span for span in others if span.end_ns > begin_ns and span.start_ns < end_ns]
        return Trace(wanted, beside=beside, arrows=self.arrows)

    @property
    def initiation_interval_s(self) -> float | None:
        """Median seconds between the ends of successive iterations; None with fewer than two.

        An iteration ends with its ``<retire>``, or in a serial run with its last task.
        """
        retired = [span.end_ns for span in self.spans if span.task == RETIRE]
        if not retired:
            last: dict[int, int] = {}
            for span in self.spans:
                last[span.iteration] = max(span.end_ns, last.get(span.iteration, span.end_ns))
            retired = sorted(last.values())
        steps = [later - sooner for sooner, later in pairwise(retired)]
        return median(steps) / 1e9 if steps else None

    def busy(self) -> dict[Row, float]:
        """The fraction of time in which each row was busy, from the first start to the last end.

        Spans in ``beside`` count too.

        Raises:
            ValueError: The trace is empty.
        """
        begin_ns, end_ns = extent_ns(self.spans)
        worked: dict[Row, int] = dict.fromkeys(rows_of(self.spans), 0)
        reached = dict.fromkeys(worked, begin_ns)
        for span in in_order((*self.spans, *self.beside)):
            if span.row in worked:  # spans of one stream may overlap, and overlaps count once
                start_ns = max(span.start_ns, reached[span.row])
                stop_ns = min(span.end_ns, end_ns)
                worked[span.row] += max(0, stop_ns - start_ns)
                reached[span.row] = max(reached[span.row], stop_ns)
        return {row: time_ns / max(1, end_ns - begin_ns) for row, time_ns in worked.items()}

    def task_times(self) -> tuple[TaskTimes, ...]:
        """The mean times per row and task, sorted by row."""
        runs: dict[tuple[Row, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            runs[span.row, span.task].append(span)
        rows = rows_of(self.spans)
        times = []
        for (row, task), spans in sorted(runs.items(), key=lambda item: rows.index(item[0][0])):
            mean_s = fmean(span.duration_ns for span in spans) / 1e9
            wait_s = fmean(span.wait_ns for span in spans) / 1e9
            times.append(TaskTimes(task, row, len(spans), mean_s, wait_s))
        return tuple(times)

    def format_summary(self) -> str:
        """A table of ``task_times`` and ``busy``, and the initiation interval.

        Raises:
            ValueError: The trace is empty.
        """
        from tabulate import tabulate

        lines = []
        busy = self.busy()
        for row, entries in groupby(self.task_times(), key=lambda entry: entry.row):
            head = (label(row), f"{busy[row]:.0%}")
            for entry in entries:
                wait = f"{entry.mean_wait_s * 1e3:.3f}" if row.kind == "thread" else ""
                lines.append((*head, entry.task, entry.runs, f"{entry.mean_s * 1e3:.3f}", wait))
                head = ("", "")
        table = tabulate(
            lines,
            headers=("row", "busy", "task", "runs", "mean ms", "mean wait ms"),
            colalign=("left", "right", "left", "right", "right", "right"),
            disable_numparse=True,
        )
        interval_s = self.initiation_interval_s
        if interval_s is None:
            return table
        return f"{table}\ninitiation interval: {interval_s * 1e3:.3f} ms (median)"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON for chrome://tracing and the Perfetto UI, without the spans in ``beside``."""
        perfetto.save(Path(path), self.spans, self.arrows)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file that ``save`` wrote.

        Raises:
            ValueError: The file has another format.
        """
        document = perfetto.load(Path(path))
        return cls(document.spans, arrows=document.arrows)

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draw the trace as a PNG, SVG or PDF picture, selected by the suffix of ``path``.

        Raises:
            ValueError: The trace is empty.
            ImportError: matplotlib is not installed; see ``swpipe[plot]``.
        """
        timeline.plot(_panels({"": self}), path, title=title)

    def format(self, width: int = 100) -> str:
        """Draw the trace for a terminal of ``width`` columns.

        Raises:
            ValueError: The trace is empty, or ``width`` is too small.
        """
        return chart(_panels({"": self}), width)


def format_stacked(traces: Mapping[str, Trace], width: int = 100) -> str:
    """Draw several traces, by heading, for a terminal, below each other on one scale.

    Raises:
        ValueError: A trace is empty, or ``width`` is too small.
    """
    return chart(_panels(traces), width)


def plot_stacked(
    traces: Mapping[str, Trace], path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draw several traces, by heading, like ``Trace.plot``, below each other on one scale."""
    timeline.plot(_panels(traces), path, title=title)


def _panels(traces: Mapping[str, Trace]) -> list[Panel]:
    return [Panel(heading, trace.spans, trace.beside) for heading, trace in traces.items()]
