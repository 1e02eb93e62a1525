"""What must hold before a schedule runs on torch's runtime, besides the rules of the checker."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from swpipe.core.messages import counted, shown
from swpipe.plans.pipeline_parallel import (
    PipelineCosts,
    PipelineSchedule,
    ScheduleError,
    check_schedule,
)

UNLIMITED = PipelineCosts(max_mem=math.inf)
"""Costs under which the checker looks at the order alone."""


def check_runnable(schedule: PipelineSchedule, n_ranks: int) -> None:
    """Check that torch's runtime can run a schedule on so many ranks.

    Besides the checker's rules, the last stage has its forward passes in the order of the
    microbatches: the runtime finds losses and outputs by how many came before.

    Raises:
        ScheduleError: It cannot.
    """
    check_schedule(schedule, UNLIMITED)
    if schedule.n_ranks != n_ranks:
        raise ScheduleError(
            f"the schedule is for {counted(schedule.n_ranks, 'rank')}, the process group has "
            f"{n_ranks}: use a schedule made for {counted(n_ranks, 'rank')}"
        )
    if schedule.n_stages % n_ranks:
        raise ScheduleError(
            f"the schedule has {counted(schedule.n_stages, 'stage')} on "
            f"{counted(n_ranks, 'rank')}: torch's runtime takes a multiple of the ranks"
        )
    last = schedule.n_stages - 1
    row = schedule.rows[schedule.placement[last]]
    forwards = [action for action in row if action.stage == last and action.op == "F"]
    for expected, action in enumerate(forwards):
        if action.micro != expected:
            raise ScheduleError(
                f"{action} comes before microbatch {expected} of the last stage: torch's runtime "
                "takes losses and outputs in the order of the microbatches; sort these passes",
                action,
            )


def check_chunks(schedule: PipelineSchedule, rank: int, chunks: Mapping[int, nn.Module]) -> None:
    """Check the chunks of the model that a rank has.

    Raises:
        ScheduleError: They are not those of the rank's stages, share a parameter, or communicate.
    """
    stages = [stage for stage, place in enumerate(schedule.placement) if place == rank]
    if sorted(chunks) != stages:
        raise ScheduleError(
            f"the chunks are those of stages {sorted(chunks)}, and the schedule places stages "
            f"{stages} here: give a module for each of these"
        )
    owner: dict[int, str] = {}
    for stage in stages:
        for name, module in chunks[stage].named_modules():
            if isinstance(module, DistributedDataParallel | FSDPModule):
                raise ScheduleError(
                    f"stage {stage}: {name or 'the chunk'} is a {type(module).__name__}, which "
                    "starts collectives inside a pass, where each rank is at another one: give "
                    "the plain module, and reduce gradients after the step"
                )
        for name, parameter in chunks[stage].named_parameters():
            other = owner.setdefault(id(parameter), f"{name} of stage {stage}")
            if other != f"{name} of stage {stage}":
                raise ScheduleError(
                    f"{name} of stage {stage} is {other}: the runtime would scale its gradient "
                    "twice, before it is complete; give each stage parameters of its own"
                )


def check_batch(tensors: Mapping[str, Tensor], n_micro: int) -> None:
    """Check that a batch can be split into microbatches of equal size.

    Args:
        tensors: Name to tensor; rows of the batch are its first dimension.
        n_micro: The number of microbatches.

    Raises:
        ValueError: It cannot.
    """
    sizes = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.dim():
            raise ValueError(f"{name} is {shown(tensor)}: give a tensor with rows of the batch")
        sizes[name] = len(tensor)
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{name} has {size} rows" for name, size in sizes.items())
        raise ValueError(f"{told}: give all of them the same rows")
    for name, size in sizes.items():
        if size < 1 or size % n_micro:
            raise ValueError(
                f"{name} has {size} rows, which {n_micro} microbatches do not divide: give a "
                f"multiple of {n_micro}"
            )


def split(tensors: Sequence[Tensor], n_micro: int) -> list[tuple[Tensor, ...]]:
    """The microbatches of a batch, in order."""
    return list(zip(*(tensor.chunk(n_micro) for tensor in tensors), strict=True))
