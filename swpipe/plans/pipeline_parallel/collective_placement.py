"""The placement of a sharded schedule's collectives: UNSHARD, RESHARD and REDUCE_GRAD.

Each rank has one link to the ranks that hold the other shards, and the link runs one collective at
a time while the rank runs passes. The collectives are placed as follows::

    UNSHARD       as early as there is room, in the order in which the stages are needed
    RESHARD       when another stage needs the room, for the stage that is needed again last
    REDUCE_GRAD   directly after the last weight gradients of its stage; the rank waits for its end
                  before the next REDUCE_GRAD

Freeing the stage that is needed again last minimizes the number of gathers (L. A. Belady, "A study
of replacement algorithms for a virtual-storage computer", 1966).
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
from swpipe.plans.pipeline_parallel.pipeline_schedule import PipelineSchedule


def place_collectives(
    schedule: PipelineSchedule, *, max_unsharded: int | None = None
) -> PipelineSchedule:
    """Return a schedule with collectives for stages that are sharded over ranks outside of it.

    Args:
        schedule: The order of passes. Its communication is removed.
        max_unsharded: The number of stages that may be unsharded at once on a rank; None for all. A
            pair needs up to two.

    Raises:
        ScheduleError: A rank has no room for a pass.
    """
    plain = schedule.passes
    rows = (_with_shards(row, rank, max_unsharded) for rank, row in enumerate(plain.rows))
    return PipelineSchedule(tuple(map(_with_reductions, rows)), plain.n_micro)


def _with_shards(row: Sequence[Entry], rank: int, limit: int | None) -> list[Entry]:
    """Return a row with UNSHARD before each stage's passes, and RESHARD where room is needed."""
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
        # The stages that are still needed, in the order of their next passes.
        coming = list(dict.fromkeys(stage for stages in stages_of[at:] for stage in stages))
        for stage in coming[:room]:
            if stage in held:
                continue
            if len(held) == room:
                # Belady's rule: a stage that is not needed any more, or else the one needed last.
                victim = next((s for s in held if s not in coming), None)
                victim = max(held, key=coming.index) if victim is None else victim
                # If even that stage is needed sooner than the one to gather, gathering has to wait.
                if coming.index(stage) > (coming.index(victim) if victim in coming else len(row)):
                    break
                placed.append(Communication(victim, "RESHARD"))
                held.remove(victim)
            placed.append(Communication(stage, "UNSHARD"))
            held.append(stage)
        placed.append(entry)
    # A step ends with all stages sharded.
    return [*placed, *(Communication(stage, "RESHARD") for stage in held)]


def _with_reductions(row: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return a row with REDUCE_GRAD of each stage directly after its last weight gradients."""
    # Later entries replace earlier ones, so that the last W or B of each stage remains.
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
