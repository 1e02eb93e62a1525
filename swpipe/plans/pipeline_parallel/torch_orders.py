"""The orders that torch.distributed.pipelining provides, made by its public classes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Literal, NamedTuple, TypeAlias, get_args

from swpipe.core.messages import shown
from swpipe.plans.pipeline_parallel.action import ScheduleError
from swpipe.plans.pipeline_parallel.pipeline_costs import require_counts
from swpipe.plans.pipeline_parallel.pipeline_schedule import PipelineSchedule

TorchOrder: TypeAlias = Literal[
    "1f1b", "interleaved", "zbv", "dualpipev", "gpipe", "looped_bfs", "interleaved_zb"
]


class _Kind(NamedTuple):
    """The torch class of an order and its properties.

    Attributes:
        torch_class: The name of the class in torch.distributed.pipelining.
        stages: The number of stages per rank.
        least: The minimal number of microbatches, per rank of the job.
        renumbered: Whether swpipe renumbers the microbatches in the order in which each stage takes
            them.
    """

    torch_class: str
    stages: int
    least: int
    renumbered: bool = False


# The minima hold in torch 2.13 to 2.15. Torch's DualPipe-V needs 2 microbatches per rank, its 1F1B
# one; the other classes raise ValueError themselves.
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
    """The attributes of a stage that torch's classes read to make their orders.

    A real ``PipelineStage`` would need a process group.
    """

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
    has_backward: bool = True
    stage_index_to_group_rank: dict[int, int] | None = None


def torch_schedule(order: TorchOrder, n_ranks: int, n_micro: int) -> PipelineSchedule:
    """Return a schedule with an order of torch.distributed.pipelining.

    Args:
        order: The name of the order. ``1f1b`` and ``gpipe`` have one stage per rank;
            ``interleaved``, ``interleaved_zb`` and ``looped_bfs`` have the stages r and n + r on
            rank r; ``zbv`` and ``dualpipev`` have two stages per rank in a V. DualPipe-V has pairs.
            The backward passes of GPipe and looped BFS run in the order of the microbatches, in
            contrast to torch.
        n_ranks: The number of ranks.
        n_micro: The number of microbatches.

    Raises:
        ScheduleError: The order is unknown, this torch lacks it, or it has no schedule for these
            numbers.
    """
    if order not in get_args(TorchOrder):
        orders = ", ".join(get_args(TorchOrder))
        raise ScheduleError(f"order is {shown(order)}: give one of {orders}")
    require_counts({"n_ranks": n_ranks, "n_micro": n_micro})
    kind = _KINDS[order]
    least = kind.least * n_ranks
    if n_micro < least:
        raise ScheduleError(
            f"torch's {kind.torch_class} on {n_ranks} ranks needs at least {least} microbatches, "
            f"and n_micro is {n_micro}: use more of them, or another schedule"
        )
    try:
        # Imported here: only these orders need it.
        make = getattr(import_module("torch.distributed.pipelining"), kind.torch_class)
    except (ImportError, AttributeError) as error:
        raise ScheduleError(
            f"this torch has no torch.distributed.pipelining.{kind.torch_class}: upgrade torch, "
            "or use another order"
        ) from error
    n_stages = kind.stages * n_ranks
    stages = [_StandInStage(s, n_stages, n_ranks) for s in range(kind.stages)]
    try:
        # Classes for one stage per rank make their order in a private method, the others in their
        # constructor (torch 2.13 to 2.15).
        if kind.stages == 1:
            by_rank = make(stages[0], n_micro)._get_pipeline_order()
        else:
            by_rank = make(stages, n_micro).pipeline_order
    except ValueError as error:
        text = " ".join(str(error).split())
        raise ScheduleError(f"torch's {kind.torch_class} has no such schedule: {text}") from error
    # In torch, 1F1B numbers the forward passes of the last rank from 1, and LoopedBFS and GPipe run
    # backward passes from the last microbatch to the first. Renumbering keeps all dependences.
    cells = ([str(entry or "") for entry in by_rank[rank]] for rank in range(n_ranks))
    text = "\n".join(map(",".join, cells))
    # Some of the orders have reductions, too.
    return PipelineSchedule.from_csv(text, renumbered=kind.renumbered).passes
