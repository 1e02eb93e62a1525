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
from itertools import chain

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
    rows = (_with_collectives(row, rank, max_unsharded) for rank, row in enumerate(plain.rows))
    return PipelineSchedule(tuple(rows), plain.n_micro)


def _with_collectives(row: Sequence[Entry], rank: int, room: int | None) -> tuple[Entry, ...]:
    passes = [actions_of((entry,)) for entry in row]
    stages_of = [[action.stage for action in actions] for actions in passes]
    most = max(len({*stages}) for stages in stages_of)
    if room is not None and room < most:
        raise ScheduleError(
            f"max_unsharded is {shown(room)}: rank {rank} runs passes of {most} stages at once"
        )
    # Later passes replace earlier ones, so that the last W or B of each stage remains.
    last = {a.stage: at for at, actions in enumerate(passes) for a in actions if a.op in "WB"}
    placed: list[Entry] = []
    held: list[int] = []
    for at, entry in enumerate(row):
        # Belady's rule: the stages to hold are those that are needed next, as many as there is room
        # for.
        coming = list(dict.fromkeys(chain.from_iterable(stages_of[at:])))[:room]
        placed += [Communication(stage, "RESHARD") for stage in held if stage not in coming]
        placed += [Communication(stage, "UNSHARD") for stage in coming if stage not in held]
        placed.append(entry)
        placed += [Communication(s, "REDUCE_GRAD") for s, place in last.items() if place == at]
        held = coming
    # A step ends with all stages sharded.
    return (*placed, *(Communication(stage, "RESHARD") for stage in held))
