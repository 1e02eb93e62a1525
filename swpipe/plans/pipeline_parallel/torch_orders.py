"""The orders that torch.distributed.pipelining has built in, taken from its public classes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from swpipe.core.messages import shown
from swpipe.plans.pipeline_parallel.action import (
    OPS,
    Action,
    Entry,
    Pair,
    ScheduleError,
    actions_of,
)
from swpipe.plans.pipeline_parallel.pipeline_costs import require_counts
from swpipe.plans.pipeline_parallel.pipeline_schedule import (
    PipelineSchedule,
    in_order_of_stages,
)

TorchOrder: TypeAlias = Literal[
    "1f1b", "interleaved", "zbv", "dualpipev", "gpipe", "looped_bfs", "interleaved_zb"
]


class _Kind(NamedTuple):
    """The class, its stages per rank, and the least number of microbatches per rank.

    ``renumbered``: microbatches are numbered in the order in which each stage takes them.
    """

    torch_class: str
    stages: int
    least: int
    renumbered: bool = False


_KINDS: dict[TorchOrder, _Kind] = {
    "1f1b": _Kind("Schedule1F1B", 1, 1, renumbered=True),
    "interleaved": _Kind("ScheduleInterleaved1F1B", 2, 0),
    "zbv": _Kind("ScheduleZBVZeroBubble", 2, 0),
    "dualpipev": _Kind("ScheduleDualPipeV", 2, 2),
    "gpipe": _Kind("ScheduleGPipe", 1, 0, renumbered=True),
    "looped_bfs": _Kind("ScheduleLoopedBFS", 2, 0, renumbered=True),
    "interleaved_zb": _Kind("ScheduleInterleavedZeroBubble", 2, 0),
}


@dataclass(slots=True)
class _StandInStage:
    """What torch's classes ask of a stage to make their orders; no process group is needed."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
    has_backward: bool = True
    stage_index_to_group_rank: dict[int, int] | None = None


def torch_schedule(order: TorchOrder, n_ranks: int, n_micro: int) -> PipelineSchedule:
    """An order of torch.distributed.pipelining.

    Args:
        order: ``1f1b`` and ``gpipe``, a stage per rank; ``interleaved``, ``interleaved_zb`` and
            ``looped_bfs``, stages r and n + r on rank r; ``zbv`` and ``dualpipev``, two stages per
            rank in a V. DualPipe-V has pairs; of GPipe and looped BFS, backward passes are in the
            order of the microbatches.
        n_ranks: The number of ranks.
        n_micro: The number of microbatches.

    Raises:
        ScheduleError: There is no such order, or it has no schedule for these numbers.
        ImportError: torch has no such class.
    """
    if order not in get_args(TorchOrder):
        raise ScheduleError(f"order is {shown(order)}: one of {', '.join(get_args(TorchOrder))}")
    require_counts({"n_ranks": n_ranks, "n_micro": n_micro})
    kind = _KINDS[order]
    least = kind.least * n_ranks
    if n_micro < least:
        raise ScheduleError(
            f"torch's {kind.torch_class} on {n_ranks} ranks needs at least {least} microbatches, "
            f"and n_micro is {n_micro}: use more of them, or another schedule"
        )
    import torch.distributed.pipelining as pipelining

    make = getattr(pipelining, kind.torch_class)
    n_stages = kind.stages * n_ranks
    stages = [_StandInStage(s, n_stages, n_ranks) for s in range(kind.stages)]
    try:
        if kind.stages == 1:
            by_rank = make(stages[0], n_micro)._get_pipeline_order()
        else:
            by_rank = make(stages, n_micro).pipeline_order
    except ValueError as error:
        text = " ".join(str(error).split())
        raise ScheduleError(f"torch's {kind.torch_class} has no such schedule: {text}") from error
    rows = [tuple(_entries(by_rank[rank])) for rank in range(n_ranks)]
    if kind.renumbered:
        # Torch counts the last rank's forward passes of 1F1B from 1, and takes the backward passes
        # of LoopedBFS and GPipe from the last microbatch on, in which order nothing else depends.
        rows = [tuple(in_order_of_stages(row)) for row in rows]
    return PipelineSchedule(tuple(rows), n_micro)


def _entries(entries: Iterable[Any]) -> Iterable[Entry]:
    """The computations among torch's entries, which may be None, a pair, or communication."""
    for entry in entries:
        if entry is None:
            continue
        if entry.sub_actions is not None:
            yield Pair(*actions_of(_entries(entry.sub_actions)))
        elif (op := entry.computation_type.value) in OPS:
            yield Action(entry.stage_index, op, entry.microbatch_index)
