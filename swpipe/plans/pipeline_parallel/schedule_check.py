"""The check of a schedule against its costs: rules, times, bubbles and memory.

``order_check`` has the rules that need no costs. The checker shares no code with the planners, so
that an error in one is not repeated in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swpipe.core.messages import shown
from swpipe.plans.pipeline_parallel.action import (
    Action,
    Communication,
    ScheduleError,
    actions_of,
)
from swpipe.plans.pipeline_parallel.order_check import TimedAction, check_rows, earliest_times
from swpipe.plans.pipeline_parallel.pipeline_costs import PipelineCosts
from swpipe.plans.pipeline_parallel.pipeline_schedule import PipelineSchedule
from swpipe.trace import Row, Span, Trace


@dataclass(frozen=True)
class ScheduleReport:
    """The times and the memory of a schedule in the units of its costs, from ``check_schedule``.

    Attributes:
        schedule: The schedule.
        times: The entries of each rank with their start and end times, each as early as the rank's
            order and the inputs allow.
        makespan: The end of the last entry on all ranks.
        bubbles: The time of each rank between its first start and its last end in which it runs no
            pass.
        peak_memory: The largest memory of each rank at any time.
    """

    schedule: PipelineSchedule
    times: tuple[tuple[TimedAction, ...], ...]
    makespan: float
    bubbles: tuple[float, ...]
    peak_memory: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The largest bubble of a rank."""
        return max(self.bubbles)

    @property
    def period(self) -> float:
        """The longest time of a rank from its first start to its last end.

        This is the step time if no collective synchronizes the ranks between steps.
        """
        return max(map(_span, self.times))

    def trace(self, *, unit_s: float = 1e-6) -> Trace:
        """Return the times as a trace, to show in the terminal, as a picture, or in Perfetto.

        Each rank is a row, and each action or pair is a span. The span ``2F`` is the forward pass
        of stage 2, and ``2F+5B`` is a pair. A span's iteration is its microbatch; for a pair, the
        microbatch of its F.

        Args:
            unit_s: The unit of the costs, in seconds.
        """

        def ns(time: float) -> int:
            return round(time * unit_s * 1e9)

        spans = []
        for rank, row in enumerate(self.times):
            before = row[0].start
            for entry, start, end in row:
                # Communication runs in the background, and would cover the passes in the chart.
                if isinstance(entry, Communication):
                    continue
                parts = actions_of((entry,))
                on = Row("thread", f"rank {rank}")
                task = "+".join(f"{part.stage}{part.op}" for part in parts)
                spans.append(
                    Span(task, parts[0].micro, on, ns(start), ns(end), ns(start) - ns(before))
                )
                before = end  # the end of the rank's previous span, from which the wait counts
        return Trace(spans)


def check_schedule(schedule: PipelineSchedule, costs: PipelineCosts) -> ScheduleReport:
    """Check that a schedule can run within the memory limit, and return its times and memory.

    A result arrives at another rank ``costs.hop`` after its action has ended, and is available on
    its own rank immediately. Memory changes when an action is issued.

    Raises:
        ScheduleError: The schedule cannot run. The message names the action; for a deadlock, it
            names the ranks and the actions for which they wait.
    """
    rows = schedule.rows
    placement = check_rows(rows, schedule.n_micro)
    n_stages = len(placement)
    # The rows are valid from here on, so that the number of stages is known.
    costs.require(n_stages)
    times = earliest_times(rows, placement, costs.time, costs.hop)
    return ScheduleReport(
        schedule,
        times,
        makespan=max(entry.end for row in times for entry in row),
        bubbles=tuple(_bubble(row) for row in times),
        peak_memory=tuple(
            _peak(row, rank, costs, n_stages) for rank, row in enumerate(map(actions_of, rows))
        ),
    )


def _span(row: Sequence[TimedAction]) -> float:
    # A collective may end after the last pass.
    return max(entry.end for entry in row) - row[0].start


def _bubble(row: Sequence[TimedAction]) -> float:
    passes = [entry for entry in row if not isinstance(entry.action, Communication)]
    return _span(row) - sum(entry.end - entry.start for entry in passes)


def _peak(row: Sequence[Action], rank: int, costs: PipelineCosts, n_stages: int) -> float:
    limit = costs.widened_limit(n_stages)
    used: float = 0
    peak: float = 0
    for action in row:
        # B is I and then W, as in the costs. The limit is checked at each issue with the memory
        # that the pass needs while it runs, which it partly frees at its end.
        for op in "IW" if action.op == "B" else action.op:
            part = action._replace(op=op)  # type: ignore[arg-type]
            most = used + costs.need(part)
            peak = max(peak, most)
            used += costs.memory(part)
            # ``limit`` has a margin for rounding; the message shows the limit without it.
            if most > limit:
                raise ScheduleError(
                    f"{action} takes rank {rank} to a memory of {shown(most)}, above max_mem = "
                    f"{shown(costs.limit(n_stages))}: use a schedule made for that limit, or raise "
                    "it",
                    action,
                )
    return peak
