"""What really ran when: spans per thread group and stream, summed up, saved and drawn."""

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
from swpipe.trace.chart import chart, charts, label
from swpipe.trace.perfetto import Arrow
from swpipe.trace.span import Row, Span, extent_ns, in_order, rows_of
from swpipe.trace.timeline import Panel


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """How long one task took on one row.

    Attributes:
        task: Its name.
        row: The thread group that ran it, or the stream that its work was on.
        runs: How many spans these are the means of.
        mean_s: Seconds from start to end. On a thread: how long the task blocks the host.
        mean_wait_s: Seconds that the thread stood before it began; 0 on streams.
    """

    task: str
    row: Row
    runs: int
    mean_s: float
    mean_wait_s: float


class Trace:
    """A record of who ran when, as ``SWPipeline.trace`` and ``Trace.load`` give it.

    Args:
        spans: What ran.
        beside: What ran in the same time and is no part of the record; drawn in grey.
        arrows: Which task needs which of the same iteration; saved with the spans.

    Attributes:
        spans: What ran, by start. While a pipeline records, none: they come when the block ends.
        beside: As given, by start.
        arrows: As given.
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
        """The trace of some iterations, both ends included; what others did meanwhile is beside.

        Raises:
            ValueError: No span is of these iterations.
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

    # ---------------------------------------------------------------- in figures

    @property
    def initiation_interval_s(self) -> float | None:
        """Median seconds from one iteration's end to the next one's; None with fewer than two.

        An iteration ends with its ``<retire>``, or, run serially, with its last task.
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
        """The part of the trace's time in which each row was at work, from 0 to 1.

        Of the time from the first start to the last end; what is beside counts in as well.

        Raises:
            ValueError: The trace is empty.
        """
        begin_ns, end_ns = extent_ns(self.spans)
        worked: dict[Row, int] = dict.fromkeys(rows_of(self.spans), 0)
        reached = dict.fromkeys(worked, begin_ns)
        for span in in_order((*self.spans, *self.beside)):
            if span.row in worked:  # spans of one stream may overlap: no moment counts twice
                start_ns = max(span.start_ns, reached[span.row])
                stop_ns = min(span.end_ns, end_ns)
                worked[span.row] += max(0, stop_ns - start_ns)
                reached[span.row] = max(reached[span.row], stop_ns)
        return {row: time_ns / max(1, end_ns - begin_ns) for row, time_ns in worked.items()}

    def task_times(self) -> tuple[TaskTimes, ...]:
        """Means per row and task, in the order of the rows and of the tasks within them."""
        turns: dict[tuple[Row, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            turns[span.row, span.task].append(span)
        rows = rows_of(self.spans)
        return tuple(
            TaskTimes(
                task,
                row,
                len(spans),
                fmean(span.duration_ns for span in spans) / 1e9,
                fmean(span.wait_ns for span in spans) / 1e9,
            )
            for (row, task), spans in sorted(turns.items(), key=lambda item: rows.index(item[0][0]))
        )

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

    # --------------------------------------------------------------- to look at

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON for chrome://tracing and the Perfetto UI; without what is beside."""
        perfetto.save(Path(path), self.spans, self.arrows)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read what ``save`` wrote.

        Raises:
            ValueError: The file is something else.
        """
        document = perfetto.load(Path(path))
        return cls(document.spans, arrows=document.arrows)

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draw the trace into a picture: PNG, SVG or PDF, by the file's suffix.

        Raises:
            ValueError: The trace is empty.
            ImportError: matplotlib is not installed; it comes with ``swpipe[plot]``.
        """
        timeline.plot([Panel("", self.spans, self.beside)], path, title=title)

    def format(self, width: int = 100) -> str:
        """Draw the trace for a terminal of ``width`` columns.

        Raises:
            ValueError: The trace is empty, or ``width`` leaves no room for the rows.
        """
        return chart(self.spans, width, beside=self.beside)


def format_stacked(traces: Mapping[str, Trace], width: int = 100) -> str:
    """Draw several traces for a terminal, one above the other and to one scale.

    Args:
        traces: Heading to trace, from the top: what was predicted, say, and what was measured.
        width: Columns that a line may have.

    Raises:
        ValueError: A trace is empty, or ``width`` leaves no room for the rows.
    """
    return charts([(head, trace.spans, trace.beside) for head, trace in traces.items()], width)


def plot_stacked(
    traces: Mapping[str, Trace], path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draw several traces into a picture, one above the other and to one scale.

    Args:
        traces: Heading to trace, from the top.
        path: The file to write: PNG, SVG or PDF, by its suffix.
        title: A line above it.

    Raises:
        ValueError: A trace is empty.
        ImportError: matplotlib is not installed; it comes with ``swpipe[plot]``.
    """
    panels = [Panel(head, trace.spans, trace.beside) for head, trace in traces.items()]
    timeline.plot(panels, path, title=title)
