"""Pair forward passes with backward passes where it pays: a pass after the search for an order.

    F I W W  ->  W (F;B)        a neighbouring I, and its W, become the B of a pair
    (F;B)    ->  F B, or B F    a pair that does not pay is taken apart

Between the two may be W, which then come before the pair; so do W of the stage that are due before
the one in the pair. What the checker refuses is left as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from swpipe.plans.pipeline_parallel.action import Action, Entry, Pair, ScheduleError
from swpipe.plans.pipeline_parallel.pipeline_costs import PipelineCosts
from swpipe.plans.pipeline_parallel.pipeline_schedule import PipelineSchedule
from swpipe.plans.pipeline_parallel.schedule_check import check_schedule
from swpipe.plans.pipeline_parallel.v_order import Objective, OrderTimes

_MOST = 500
"""How many changes are tried: seconds where there are hundreds of passes."""


def pair_passes(
    schedule: PipelineSchedule, costs: PipelineCosts, objective: Objective
) -> tuple[float, PipelineSchedule]:
    """Join and take apart pairs as long as the objective gets better; its value, the schedule.

    Args:
        schedule: Any that fits the costs.
        costs: With the time of a pair.
        objective: As for ``plan_v_schedule``.

    Raises:
        ScheduleError: The schedule does not fit the costs.
    """

    def value(schedule: PipelineSchedule) -> tuple[float, float]:
        """The maximum over the ranks; and their sum, which leads over plateaus."""
        report = check_schedule(schedule, costs)
        ends = [row[-1].end for row in report.times]
        spans = [row[-1].end - row[0].start for row in report.times]
        values = OrderTimes(ends, spans, list(report.bubbles)).values(objective)
        return max(values), sum(values)

    best, least, before = schedule, value(schedule), None
    places = [(rank, at) for rank, row in enumerate(schedule.rows) for at in range(len(row))]
    tried = 0
    while least != before and tried < _MOST:
        before = least
        for rank, at in places:
            rows = best.rows
            for row in _changed(rows[rank], at) if tried < _MOST else ():
                tried += 1
                other = PipelineSchedule((*rows[:rank], row, *rows[rank + 1 :]), schedule.n_micro)
                with suppress(ScheduleError):  # an input, or memory, would come too late
                    if (found := value(other)) < least:
                        best, least = other, found
    return least[0], best


def _changed(row: tuple[Entry, ...], at: int) -> Iterator[tuple[Entry, ...]]:
    """The rows that differ in the pass at this place."""
    entry = row[at] if at < len(row) else None  # pairs shorten it
    if isinstance(entry, Pair):
        for parts in (entry, entry[::-1]):
            yield (*row[:at], *parts, *row[at + 1 :])
    elif isinstance(entry, Action) and entry.op == "F":
        for side in (row[:at][::-1], row[at + 1 :]):
            other = next(
                (one for one in side if not (isinstance(one, Action) and one.op == "W")), 0
            )
            if isinstance(other, Action) and other.op in "IB":
                yield _joined(row, entry, other)


def _joined(row: tuple[Entry, ...], f: Action, b: Action) -> tuple[Entry, ...]:
    """The row with two passes as a pair, in the place of the later one."""
    weights = [Action(b.stage, "W", micro) for micro in range(b.micro + 1)]
    at = max(row.index(f), row.index(b))
    late = [one for one in weights[:-1] if one in row[at:]]
    taken = {f, b, weights[-1], *late}
    ahead, rest = ([one for one in part if one not in taken] for part in (row[:at], row[at:]))
    return (*ahead, *late, Pair(f, b._replace(op="B")), *rest)
