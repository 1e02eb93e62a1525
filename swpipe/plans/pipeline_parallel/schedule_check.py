"""Check a schedule against its costs: rules, times, bubbles and memory.

The checker shares no code with what makes schedules; ``order_check`` has the rules that need no
costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
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
from swpipe.trace.perfetto import Arrow


@dataclass(frozen=True)
class ScheduleReport:
    """What a schedule costs, from ``check_schedule``; times and memory in the units of the costs.

    Attributes:
        schedule: The schedule.
        times: The actions of each rank with their starts and ends: as early as the rank's order
            and the inputs allow.
        makespan: The end of the last action on all ranks.
        bubbles: Per rank, the idle time between its first start and its last end.
        peak_memory: Per rank, the most memory at any time.
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
        """The most that a rank works and idles in a step.

        Steps follow each other in this time where no collective joins the ranks.
        """
        return max(row[-1].end - row[0].start for row in self.times)

    def trace(self, *, unit_s: float = 1e-6) -> Trace:
        """The times as a trace: a chart for the terminal, a picture, a file for Perfetto.

        Each rank is a row, each action or pair a span; ``2F`` is the forward pass of stage 2,
        ``2F+5B`` a pair, and the iteration is the microbatch, of a pair that of its F.

        Args:
            unit_s: The unit of the costs, in seconds.
        """

        def ns(time: float) -> int:
            return round(time * unit_s * 1e9)

        spans = []
        for rank, row in enumerate(self.times):
            before = row[0].start
            for entry, start, end in row:
                if isinstance(entry, Communication):
                    continue
                parts, on = actions_of((entry,)), Row("thread", f"rank {rank}")
                task = "+".join(f"{one.stage}{one.op}" for one in parts)
                spans.append(
                    Span(task, parts[0].micro, on, ns(start), ns(end), ns(start) - ns(before))
                )
                before = end
        return Trace(spans, arrows=_arrows({span.task for span in spans}))


def check_schedule(schedule: PipelineSchedule, costs: PipelineCosts) -> ScheduleReport:
    """Check that a schedule can run, in the memory that there is, and give its times.

    A result is on another rank ``costs.hop`` after the action that made it, and on its own rank at
    once. Memory changes when an action is issued.

    Raises:
        ScheduleError: It cannot; the message names the action, and of a deadlock who waits for
            what.
    """
    rows = schedule.rows
    placement = check_rows(rows, schedule.n_micro)
    costs.require(len(rows), len(placement))
    times = earliest_times(rows, placement, lambda one: costs.time(one, placement), costs.hop)
    return ScheduleReport(
        schedule,
        times,
        makespan=max(row[-1].end for row in times),
        bubbles=tuple(_bubble(row) for row in times),
        peak_memory=tuple(
            _peak(row, rank, costs, placement) for rank, row in enumerate(map(actions_of, rows))
        ),
    )


def _arrows(tasks: Set[str]) -> Iterator[Arrow]:
    """From the passes of a stage to those of its neighbours, and within a stage; none of pairs."""
    for task in sorted(task for task in tasks if "+" not in task):
        stage, op = int(task[:-1]), task[-1]
        for other, producer in ((stage - 1, "F"), (stage + 1, "I"), (stage + 1, "B"), (stage, "F")):
            if f"{other}{producer}" in tasks and _follows(op, producer, other == stage):
                yield Arrow(f"{other}{producer}", task)


def _follows(op: str, producer: str, same_stage: bool) -> bool:
    if same_stage:
        return op in "IB"
    return op == "F" if producer == "F" else op in "IB"


def _bubble(row: Sequence[TimedAction]) -> float:
    return row[-1].end - row[0].start - sum(one.end - one.start for one in row)


def _peak(
    row: Sequence[Action], rank: int, costs: PipelineCosts, placement: Sequence[int]
) -> float:
    n_stages = len(placement)
    limit = costs.widened_limit(n_stages)
    used: float = 0
    peak: float = 0
    for action in row:
        for op in "IW" if action.op == "B" else action.op:
            one = action._replace(op=op)  # type: ignore[arg-type]
            peak = max(peak, most := used + costs.need(one, placement))
            used += costs.memory(one, placement)
            if most > limit:
                raise ScheduleError(
                    f"{action} takes rank {rank} to a memory of {shown(most)}, above max_mem = "
                    f"{shown(costs.limit(n_stages))}: use a schedule made for that limit, or raise "
                    "it",
                    action,
                )
    return peak
