"""Traces: when each task ran on which thread group and stream; statistics, files, pictures."""

from __future__ import annotations

import html
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from swpipe.core.records import Rows
from swpipe.core.tables import table
from swpipe.core.task import TaskRef, names_of
from swpipe.core.task_memory import TaskMemory
from swpipe.program import RETIRE
from swpipe.trace import perfetto, timeline
from swpipe.trace.bytes_in_flight import PeakMemory, peak_memory
from swpipe.trace.chart import chart
from swpipe.trace.critical_path import CriticalPath, critical_path
from swpipe.trace.lanes import LaneTimes, hidden, lanes
from swpipe.trace.perfetto import Arrow
from swpipe.trace.span import Panel, Row, Span, extent_ns, in_order, rows_of

_LEAST_SHARE = 0.02  # share of a row's time; shorter waits are not shown


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


class Trace(Rows):
    """A record of when each task ran, from ``SWPipeline.trace`` or ``Trace.load``.

    Statistics and pictures of an empty trace raise a ValueError. Pictures need matplotlib,
    ``swpipe[plot]``; without it they raise a ModuleNotFoundError.

    Attributes:
        spans: The recorded spans, by start; empty until the ``with`` block of a recording ends.
        beside: The parts of other iterations' spans in the same time. They are drawn, but are not
            part of the record.
        arrows: The plan's dependences; saved with the spans.
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
        return f"<swpipe.trace.Trace of {len(self.spans)} spans in {iterations} iterations>"

    def window(self, first_iteration: int, last_iteration: int) -> Trace:
        """Return the trace of some iterations, both ends included.

        Spans of other iterations in that time are in ``beside``.

        Raises:
            ValueError: The trace has none of these iterations.
        """
        wanted = [s for s in self.spans if first_iteration <= s.iteration <= last_iteration]
        if not wanted:
            have = sorted({span.iteration for span in self.spans})
            raise ValueError(
                f"iterations {first_iteration} to {last_iteration} are not in the trace, which has "
                + (f"{have[0]} to {have[-1]}" if have else "none")
            )
        begin_ns, end_ns = extent_ns(wanted)
        # A window of a window keeps the other spans that still overlap.
        others = {*self.spans, *self.beside}.difference(wanted)
        beside = [
            replace(span, start_ns=max(span.start_ns, begin_ns), end_ns=min(span.end_ns, end_ns))
            for span in others
            if span.end_ns > begin_ns and span.start_ns < end_ns
        ]
        return Trace(wanted, beside=beside, arrows=self.arrows)

    def steady(self, count: int = 4) -> Trace:
        """Return the trace of a few successive iterations that take as long as most do.

        Iterations that fill and drain the pipeline are left out if there are enough others.

        Args:
            count: How many iterations; all, if the trace has no more.

        Raises:
            ValueError: There is no span, or ``count`` is below 1.
        """
        if count < 1:
            raise ValueError(f"count is {count}: show 1 iteration or more")
        extent_ns(self.spans)  # refuses an empty trace
        ends = self._ends_ns()
        numbers = sorted(ends)
        # The first quarter and the last eighth are left out: the pipeline may fill and drain there.
        inner = numbers[len(numbers) // 4 : len(numbers) - len(numbers) // 8]
        if len(inner) <= count:
            inner = numbers[-count - 1 :]
        usual_ns = 1e9 * count * (self.initiation_interval_s or 0.0)
        # Each window begins with one extra iteration, whose end is the window's beginning. The
        # window whose length is closest to the usual one is shown.
        windows = [inner[k : k + count + 1] for k in range(len(inner) - count)]
        windows.sort(key=lambda of: abs(ends[of[-1]] - ends[of[0]] - usual_ns))
        shown = windows[0][1:] if windows else inner
        return self.window(shown[0], shown[-1])

    def _ends_ns(self) -> dict[int, int]:
        """Return when each iteration ended: with its ``<retire>``, or else with its last task."""
        # A serial run has no <retire>.
        if retired := {s.iteration: s.end_ns for s in self.spans if s.task == RETIRE}:
            return retired
        ends: dict[int, int] = {}
        for span in self.spans:
            ends[span.iteration] = max(span.end_ns, ends.get(span.iteration, span.end_ns))
        return ends

    @property
    def initiation_interval_s(self) -> float | None:
        """The median seconds between the ends of successive iterations; None with fewer than two.

        An iteration ends with its ``<retire>``, or in a serial run with its last task.
        """
        ends = sorted(self._ends_ns().values())
        # The median: one slow step, such as for a checkpoint, does not change it.
        steps = [later - sooner for sooner, later in pairwise(ends)]
        return median(steps) / 1e9 if steps else None

    def task_times(self) -> tuple[TaskTimes, ...]:
        """Return the mean times per row and task, sorted by row."""
        # By row and not by thread group: a group's workers have a row each.
        runs: dict[tuple[Row, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            runs[span.row, span.task].append(span)
        rows = rows_of(self.spans)
        return tuple(
            TaskTimes(
                task,
                row,
                len(spans),
                fmean(span.duration_ns for span in spans) / 1e9,
                fmean(span.wait_ns for span in spans) / 1e9,
            )
            for (row, task), spans in sorted(runs.items(), key=lambda item: rows.index(item[0][0]))
        )

    def lanes(self) -> tuple[LaneTimes, ...]:
        """Return what each thread and stream did: busy, waiting and for what, idle."""
        return lanes(self.spans, self.arrows)

    def hidden(self, *tasks: TaskRef) -> float | None:
        """Return the share of some tasks' time in which other tasks ran too, from 0 to 1.

        For the tasks that communicate, this is the share of the communication that is hidden.

        Returns:
            None if the tasks took no time, or are not in the trace.
        """
        return hidden(self.spans, names_of(tasks))

    def critical_path(self) -> CriticalPath:
        """Return the chain of spans and waits that determines the length of the trace."""
        return critical_path(self.spans, self.arrows)

    def peak_memory(self, memory: TaskMemory, *, streams: bool = False) -> PeakMemory:
        """Return when the iterations of the trace held the most memory, and its parts.

        Args:
            memory: The memory of the tasks, from ``swpipe.profiler.measure_memory``.
            streams: Whether the plan uses streams on a device. Memory that tasks remove from an
                iteration's context is then held until the iteration is retired and other streams
                are done with it.
        """
        # A task's memory belongs to the stream on which it works: tasks without one use the
        # caller's.
        made_on = {span.task: span.row.name for span in self.spans if span.row.kind == "stream"}
        return peak_memory(self.spans, memory, streams=made_on if streams else None)

    def records(self) -> list[dict[str, Any]]:
        """Return one row per span, of plain values; times in microseconds."""
        return [
            {
                "task": span.task,
                "iteration": span.iteration,
                "kind": span.row.kind,
                "row": span.row.name,
                "start_us": span.start_ns / 1e3,
                "duration_us": span.duration_ns / 1e3,
                "wait_us": span.wait_ns / 1e3,
            }
            for span in self.spans
        ]

    def as_text(self) -> str:
        return self.format_summary() if self.spans else repr(self)

    def _repr_html_(self) -> str:
        """Return the timeline of a few iterations and the summary, for a notebook."""
        if not self.spans:
            return super()._repr_html_()
        return html_of(self.steady()) + super()._repr_html_()

    def format_summary(self) -> str:
        """Return the rows' and tasks' times, the critical path and the initiation interval."""
        lines: list[tuple[Any, ...]] = []
        waits: list[str] = []
        times = self.task_times()
        for lane in self.lanes():
            whole_ns = max(1, lane.length_ns)
            parts = (lane.busy_ns, sum(lane.waiting_ns.values()), lane.idle_ns)
            head = (lane.row.label, *(f"{part / whole_ns:.0%}" for part in parts))
            for mean in (mean for mean in times if mean.row == lane.row):
                wait = f"{mean.mean_wait_s * 1e3:.3f}" if mean.row.kind == "thread" else ""
                lines.append((*head, mean.task, mean.runs, f"{mean.mean_s * 1e3:.3f}", wait))
                # The figures of a row appear once, in the line of its first task.
                head = ("",) * len(head)
            # A lane's waits are sorted, the longest first.
            shares = {task: ns / whole_ns for task, ns in lane.waiting_ns.items()}
            long = [
                f"{task} {share:.0%}" for task, share in shares.items() if share >= _LEAST_SHARE
            ]
            waits += [f"{lane.row.label} waits for {', '.join(long)}"] if long else []
        titles = ("row", "busy", "waits", "idle", "task", "runs", "mean ms", "mean wait ms")
        interval_s = self.initiation_interval_s
        if interval_s is not None:
            waits.append(f"initiation interval: {interval_s * 1e3:.3f} ms (median)")
        return "\n".join([table(titles, lines, left=(0, 4)), *waits, self.critical_path().format()])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON for chrome://tracing and the Perfetto UI, without the spans in ``beside``.

        A file whose name ends in ``.gz`` is compressed, to about a tenth; Perfetto reads it.
        """
        perfetto.save(Path(path), self.spans, self.arrows)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file that ``save`` wrote.

        Raises:
            ValueError: The file is not one of those.
        """
        spans, arrows = perfetto.load(Path(path))
        return cls(spans, arrows=arrows)

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draw the trace as a PNG, SVG or PDF picture, selected by the suffix of ``path``."""
        plot_stacked({"": self}, path, title=title)

    def format(self, width: int = 100) -> str:
        """Draw the trace for a terminal of ``width`` columns."""
        return format_stacked({"": self}, width)


def format_stacked(traces: Mapping[str, Trace], width: int = 100) -> str:
    """Draw several traces, by heading, for a terminal, below each other on one scale."""
    return chart(_panels(traces), width)


def plot_stacked(
    traces: Mapping[str, Trace], path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draw several traces, by heading, like ``Trace.plot``, below each other on one scale."""
    timeline.plot(_panels(traces), path, title=title)


def svg_stacked(traces: Mapping[str, Trace]) -> str:
    """Draw several traces, by heading, as one ``<svg>`` element."""
    return timeline.svg(_panels(traces))


def html_of(trace: Trace) -> str:
    """Draw a trace as an ``<svg>`` element, or with characters where there is no matplotlib."""
    try:
        return svg_stacked({"": trace})
    except ModuleNotFoundError:
        return f"<pre>{html.escape(trace.format())}</pre>"


def _panels(traces: Mapping[str, Trace]) -> list[Panel]:
    """Return one panel per trace."""
    return [Panel(heading, [*trace.spans, *trace.beside]) for heading, trace in traces.items()]
