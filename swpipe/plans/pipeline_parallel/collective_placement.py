"""Where a schedule gathers the parameters of sharded stages, frees them, and reduces gradients.

Each rank has one link to the ranks that hold the other shards, which one collective at a time
takes. While parameters are gathered, passes of other stages run; the rank waits while gradients are
reduced. Therefore::

    UNSHARD       as early as there is room: what is needed first is gathered first
    RESHARD       of the stage that is needed again last, when another one needs its room
    REDUCE_GRAD   after the last weight gradients of its stage, and as much later as it pays: behind
                  the passes that other ranks wait for

Which stage to free is the choice that gathers least often (L. A. Belady, "A study of replacement
algorithms for a virtual-storage computer", 1966).
"""

from __future__ import annotations

from collections.abc import Sequence

from swpipe.core.messages import shown
from swpipe.plans.pipeline_parallel.action import (
    Communication,
    Entry,
    ScheduleError,
    actions_of,
)
from swpipe.plans.pipeline_parallel.pipeline_costs import PipelineCosts
from swpipe.plans.pipeline_parallel.pipeline_schedule import PipelineSchedule
from swpipe.plans.pipeline_parallel.schedule_check import check_schedule

_ROUNDS = 3
"""How often all reductions are moved: a later one may make room for an earlier one."""


def place_collectives(
    schedule: PipelineSchedule, costs: PipelineCosts, *, max_unsharded: int | None = None
) -> PipelineSchedule:
    """Place the collectives of a schedule whose stages are sharded over other ranks.

    Args:
        schedule: The order of passes; communication that it has is placed anew.
        costs: With ``unshard`` and ``reduce``.
        max_unsharded: How many stages a rank has room for; None for all. A pair needs two.

    Raises:
        ScheduleError: The schedule does not fit the costs, or there is no room for a pass.
    """
    plain = schedule.passes
    rows = [_with_shards(row, rank, max_unsharded) for rank, row in enumerate(plain.rows)]
    best = PipelineSchedule(tuple(map(_with_reductions, rows)), plain.n_micro)
    least = _value(best, costs)
    for _ in range(_ROUNDS):
        before = least
        for rank in range(best.n_ranks):
            for stage in sorted({action.stage for action in best.actions[rank]}):
                for row in _later(best.rows[rank], Communication(stage, "REDUCE_GRAD")):
                    others = best.rows[:rank], best.rows[rank + 1 :]
                    changed = PipelineSchedule((*others[0], row, *others[1]), plain.n_micro)
                    value = _value(changed, costs)
                    if value < least:
                        best, least = changed, value
        if least == before:
            break
    return best


def _value(schedule: PipelineSchedule, costs: PipelineCosts) -> tuple[float, float]:
    """The makespan; and the sum of the ends of all ranks, which leads over plateaus."""
    report = check_schedule(schedule, costs)
    return report.makespan, sum(row[-1].end for row in report.times)


def _with_shards(row: Sequence[Entry], rank: int, limit: int | None) -> list[Entry]:
    """Gather each stage before its passes, and free the one that is needed last for room."""
    stages_of = [list(dict.fromkeys(a.stage for a in actions_of((entry,)))) for entry in row]
    every = list(dict.fromkeys(stage for stages in stages_of for stage in stages))
    room = len(every) if limit is None else limit
    most = max(map(len, stages_of))
    if room < most:
        raise ScheduleError(
            f"max_unsharded is {shown(limit)}: rank {rank} runs passes of {most} stages at once"
        )
    placed: list[Entry] = []
    held: list[int] = []
    for at, entry in enumerate(row):
        # What comes next: these stages are needed in this order.
        coming = list(dict.fromkeys(stage for stages in stages_of[at:] for stage in stages))
        for stage in coming[:room]:
            if stage in held:
                continue
            if len(held) == room:
                victim = next((s for s in held if s not in coming), None)
                victim = max(held, key=coming.index) if victim is None else victim
                if coming.index(stage) > (coming.index(victim) if victim in coming else len(row)):
                    break
                placed.append(Communication(victim, "RESHARD"))
                held.remove(victim)
            placed.append(Communication(stage, "UNSHARD"))
            held.append(stage)
        placed.append(entry)
    return [*placed, *(Communication(stage, "RESHARD") for stage in held)]


def _with_reductions(row: Sequence[Entry]) -> tuple[Entry, ...]:
    """Reduce each stage directly after its last weight gradients."""
    last = {
        action.stage: at
        for at, entry in enumerate(row)
        for action in actions_of((entry,))
        if action.op in "WB"
    }
    placed: list[Entry] = []
    for at, entry in enumerate(row):
        placed.append(entry)
        placed += [Communication(s, "REDUCE_GRAD") for s, place in last.items() if place == at]
    return tuple(placed)


def _later(row: tuple[Entry, ...], reduction: Communication) -> list[tuple[Entry, ...]]:
    """Return the rows in which a reduction comes later, before its stage is resharded."""
    at = row.index(reduction)
    rest = row[:at] + row[at + 1 :]
    until = rest.index(Communication(reduction.stage, "RESHARD"), at)
    return [(*rest[:place], reduction, *rest[place:]) for place in range(at + 1, until + 1)]
