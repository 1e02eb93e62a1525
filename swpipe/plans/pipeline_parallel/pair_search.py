"""A local search that joins forward and backward passes to pairs, after the search for an order.

The search tries two changes::

    F I W W  ->  W (F;B)        joins an F with a neighbouring I and the W of the I
    (F;B)    ->  F B, or B F    takes a pair apart

Other W between F and I, and earlier W of the same stage, move before the pair. A change that the
checker refuses is not made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from swpipe.plans.pipeline_parallel.action import Action, Entry, Pair, ScheduleError
from swpipe.plans.pipeline_parallel.pipeline_costs import PipelineCosts
from swpipe.plans.pipeline_parallel.pipeline_schedule import PipelineSchedule
from swpipe.plans.pipeline_parallel.schedule_check import check_schedule
from swpipe.plans.pipeline_parallel.v_order import Objective

_MOST = 500
"""The maximal number of changes to try, which takes seconds for hundreds of passes."""


def pair_passes(
    schedule: PipelineSchedule, costs: PipelineCosts, objective: Objective
) -> tuple[float, PipelineSchedule]:
    """Improve a schedule by joining passes and separating pairs.

    Args:
        schedule: A schedule that fits the costs.
        costs: The costs, which include ``pair``.
        objective: The value to minimize; see ``plan_v_schedule``.

    Returns:
        The value of the objective, and the best schedule.

    Raises:
        ScheduleError: The schedule does not fit the costs.
    """

    def value(schedule: PipelineSchedule) -> tuple[float, float]:
        """Return the value of the objective, and the ranks' ends to compare equal values."""
        report = check_schedule(schedule, costs)
        # The objectives have the names of the report's properties.
        return getattr(report, objective), sum(row[-1].end for row in report.times)

    best = schedule
    least = value(schedule)
    before = None
    places = [(rank, at) for rank, row in enumerate(schedule.rows) for at in range(len(row))]
    tried = 0
    while least != before and tried < _MOST:
        before = least
        for rank, at in places:
            rows = best.rows
            for row in _changed(rows[rank], at) if tried < _MOST else ():
                tried += 1
                other = PipelineSchedule((*rows[:rank], row, *rows[rank + 1 :]), schedule.n_micro)
                # A pair waits for the inputs of both passes and holds the memory of both, so that
                # the changed order may deadlock or exceed the memory.
                with suppress(ScheduleError):
                    new = value(other)
                    if new < least:
                        best = other
                        least = new
    return least[0], best


def _changed(row: tuple[Entry, ...], at: int) -> Iterator[tuple[Entry, ...]]:
    """Yield the rows in which the pair at a place is separated, or the F there becomes a pair."""
    entry = row[at] if at < len(row) else None  # each pair makes the row shorter by one or two
    if isinstance(entry, Pair):
        for parts in (entry, entry[::-1]):
            yield (*row[:at], *parts, *row[at + 1 :])
    elif isinstance(entry, Action) and entry.op == "F":
        for side in (row[:at][::-1], row[at + 1 :]):
            other = next(
                (near for near in side if not (isinstance(near, Action) and near.op == "W")), 0
            )
            if isinstance(other, Action) and other.op in "IB":
                yield _joined(row, entry, other)


def _joined(row: tuple[Entry, ...], f: Action, b: Action) -> tuple[Entry, ...]:
    """Return the row with two passes as a pair, in the place of the later pass."""
    # The B of the pair includes its W. Earlier W of the stage that are still to come would be added
    # after it, out of the order of the microbatches: they move before the pair.
    weights = [Action(b.stage, "W", micro) for micro in range(b.micro + 1)]
    at = max(row.index(f), row.index(b))
    late = [weight for weight in weights[:-1] if weight in row[at:]]
    taken = {f, b, weights[-1], *late}
    ahead, rest = ([e for e in part if e not in taken] for part in (row[:at], row[at:]))
    return (*ahead, *late, Pair(f, b._replace(op="B")), *rest)
