"""Pair forward passes with backward passes where it pays: a pass after the search for an order.

    F I W W  ->  W (F;B)        a neighbouring I, and its W, become the B of a pair
    (F;B)    ->  F B, or B F    a pair that does not pay is taken apart

Between the two may be W, which then come before the pair; so do W of the stage that are due before
the one in the pair. What the checker refuses is left as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from swpipe.plans.pipeline_parallel.action import Action, Entry, Pair, ScheduleError
from swpipe.plans.pipeline_parallel.pipeline_costs import PipelineCosts
from swpipe.plans.pipeline_parallel.pipeline_schedule import PipelineSchedule
from swpipe.plans.pipeline_parallel.schedule_check import ScheduleReport, check_schedule
from swpipe.plans.pipeline_parallel.v_order import Objective, OrderTimes

_MOST = 500
"""How many changes are tried: seconds where there are hundreds of passes."""


class PairedSchedule(NamedTuple):
    """A schedule and what it costs, in the unit of the costs.

    Attributes:
        schedule: The schedule.
        costs: The value of the objective; and, to lead over plateaus, the sum over the ranks.
    """

    schedule: PipelineSchedule
    costs: tuple[float, float]


def pair_passes(
    schedule: PipelineSchedule, costs: PipelineCosts, objective: Objective
) -> PairedSchedule:
    """Join and take apart pairs as long as the objective gets better.

    Args:
        schedule: Any that fits the costs.
        costs: With the time of a pair.
        objective: As for ``plan_v_schedule``.

    Raises:
        ScheduleError: The schedule does not fit the costs.
    """
    best = _costed(schedule, costs, objective)
    places = [(rank, at) for rank, row in enumerate(schedule.rows) for at in range(len(row))]
    before, left = None, _MOST
    while best != before:
        before = best
        for rank, at in places:
            rows = best.schedule.rows
            for row in _changed(rows[rank], at) if left > 0 else ():
                left -= 1
                other = (*rows[:rank], row, *rows[rank + 1 :])
                with suppress(ScheduleError):  # an input, or memory, would come too late
                    tried = _costed(PipelineSchedule(other, schedule.n_micro), costs, objective)
                    best = min(best, tried, key=lambda one: one.costs)
    return best


def _costed(
    schedule: PipelineSchedule, costs: PipelineCosts, objective: Objective
) -> PairedSchedule:
    report: ScheduleReport = check_schedule(schedule, costs)
    ends = [row[-1].end for row in report.times]
    spans = [row[-1].end - row[0].start for row in report.times]
    values = OrderTimes(ends, spans, list(report.bubbles)).values(objective)
    return PairedSchedule(schedule, (max(values), sum(values)))


def _changed(row: tuple[Entry, ...], at: int) -> Iterator[tuple[Entry, ...]]:
    """The rows that differ in the pass at this place."""
    entry = row[at] if at < len(row) else None  # pairs shorten it
    if isinstance(entry, Pair):
        yield (*row[:at], *entry, *row[at + 1 :])
        yield (*row[:at], *entry[::-1], *row[at + 1 :])
    elif entry is not None and entry.op == "F":
        for step in (-1, 1):
            other = at + step
            while 0 <= other < len(row) and _op(row[other]) == "W":
                other += step
            if 0 <= other < len(row) and _op(row[other]) in ("I", "B"):
                yield _joined(row, at, other)


def _op(entry: Entry) -> str:
    return "pair" if isinstance(entry, Pair) else entry.op


def _joined(row: tuple[Entry, ...], f: int, b: int) -> tuple[Entry, ...]:
    """The row with two passes as a pair, in the place of the later one."""
    stage, _, micro = back = row[b]  # type: ignore[misc]
    late = [
        entry
        for entry in row[max(f, b) :]
        if _op(entry) == "W" and entry[0] == stage and entry[2] <= micro  # type: ignore[misc]
    ]
    taken = {row[f], back, Action(stage, "W", micro), *late}
    due = [entry for entry in late if entry[2] != micro]  # type: ignore[misc]
    ahead, rest = row[: max(f, b)], row[max(f, b) :]
    pair = Pair(row[f], Action(stage, "B", micro))  # type: ignore[arg-type]
    return (
        *(entry for entry in ahead if entry not in taken),
        *due,
        pair,
        *(entry for entry in rest if entry not in taken),
    )
