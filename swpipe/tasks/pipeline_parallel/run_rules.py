"""Checks of schedules, chunks and batches before they run on torch's runtime."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from swpipe.core.messages import counted, listed
from swpipe.plans.pipeline_parallel import (
    Action,
    PipelineCosts,
    PipelineSchedule,
    ScheduleError,
    check_schedule,
)

UNLIMITED = PipelineCosts(max_mem=math.inf)
"""Costs without a memory limit, under which the checker checks only the order."""


# Parameters of the runtime's ``step`` and ``eval``, which pass other keywords on to the stages.
_TAKEN = frozenset({"target", "losses", "return_outputs", "loss_kwargs"})


def check_runnable(schedule: PipelineSchedule, n_ranks: int) -> None:
    """Check that torch's runtime can run a schedule on ``n_ranks`` ranks.

    In addition to the rules of ``check_schedule``, the last stage must run its forward passes in
    the order of the microbatches.

    Raises:
        ScheduleError: The runtime cannot run the schedule.
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
    # The runtime appends losses and outputs to lists, and looks up the loss of microbatch i at
    # index i.
    last = schedule.n_stages - 1
    row = schedule.actions[schedule.placement[last]]
    forwards = [action for action in row if action.stage == last and action.op == "F"]
    for action in _out_of_order(forwards):
        raise ScheduleError(
            f"{action} comes out of the order of the microbatches: torch's runtime takes losses "
            "and outputs of the last stage in that order; sort these passes",
            action,
        )


def _out_of_order(forwards: Sequence[Action]) -> Iterator[Action]:
    return (action for expected, action in enumerate(forwards) if action.micro != expected)


def check_chunks(
    schedule: PipelineSchedule,
    rank: int,
    chunks: Mapping[int, nn.Module],
    ranks: Sequence[int],
) -> None:
    """Check that a rank's chunks match its stages, share nothing, and can run split passes.

    Args:
        schedule: The schedule.
        rank: This rank, in the group of the pipeline, from 0.
        chunks: The module of each stage, by stage, from 0.
        ranks: The ranks of the pipeline, in the default group.

    Raises:
        ScheduleError: The chunks are not those of the rank's stages, share a parameter, or are
            wrapped for data parallelism in a way that would make ranks wait for each other.
    """
    stages = [stage for stage, place in enumerate(schedule.placement) if place == rank]
    if sorted(chunks) != stages:
        raise ScheduleError(
            f"the chunks are those of stages {sorted(chunks)}, and the schedule places stages "
            f"{stages} here: give a module for each of these"
        )
    owner: dict[int, str] = {}
    for stage in stages:
        forwards = [a for a in schedule.actions[rank] if a.stage == stage and a.op == "F"]
        # A running mean, for example, depends on the order of the forward passes.
        buffer = next((name for name, _ in chunks[stage].named_buffers()), None)
        if buffer is not None and (early := next(_out_of_order(forwards), None)) is not None:
            raise ScheduleError(
                f"{early} comes out of the order of the microbatches, and stage {stage} has the "
                f"buffer {buffer}, which a pass may change: sort the F of this stage",
                early,
            )
        has_split = any(a.stage == stage and a.op == "I" for a in schedule.actions[rank])
        _check_data_parallel(chunks[stage], stage, ranks, has_split=has_split)
        for name, parameter in chunks[stage].named_parameters():
            # By identity: ``tied.weight is embedding.weight`` across two stages of this rank.
            own = f"{name} of stage {stage}"
            if (other := owner.setdefault(id(parameter), own)) != own:
                raise ScheduleError(
                    f"{own} is {other}: the runtime would scale its gradient twice, before it is "
                    "complete; give each stage parameters of its own"
                )


def _check_data_parallel(
    chunk: nn.Module, stage: int, ranks: Sequence[int], *, has_split: bool
) -> None:
    """Check that data parallelism wraps the whole chunk, over ranks of other pipelines.

    Raises:
        ScheduleError: A wrapper is inside the chunk, or spans ranks of this pipeline, or looks at
            whole backward passes while the schedule splits them.
    """
    # ``fully_shard`` on modules within a chunk is allowed if the chunk itself is sharded: the stage
    # switches the reduction off for the chunk and its modules together.
    for name, module in chunk.named_modules():
        is_wrapper = isinstance(module, DistributedDataParallel | FSDPModule)
        inside = name and not (isinstance(module, FSDPModule) and isinstance(chunk, FSDPModule))
        if is_wrapper and inside:
            raise ScheduleError(
                f"stage {stage}: {name} is a {type(module).__name__} inside a chunk that is "
                "not one, and would reduce after each microbatch: wrap the chunk as a whole"
            )
    if not isinstance(chunk, DistributedDataParallel):
        return
    # Ranks of the same pipeline have different stages, so their reductions would not match.
    shared = set(ranks).intersection(dist.get_process_group_ranks(chunk.process_group))
    if len(shared) > 1:
        raise ScheduleError(
            f"stage {stage}: the chunk is a DistributedDataParallel over ranks "
            f"{listed([str(rank) for rank in sorted(shared)])} of the pipeline, each of which has "
            "other stages: give it a process_group that has one rank of each pipeline"
        )
    if has_split and (chunk.find_unused_parameters or chunk.static_graph):
        raise ScheduleError(
            f"stage {stage}: a DistributedDataParallel with find_unused_parameters or static_graph "
            "looks at a whole backward pass, and the schedule splits it: use B instead of I and W, "
            "or neither option"
        )


def check_batch(
    inputs: Iterable[Tensor],
    target: Tensor | None,
    n_micro: int,
    keywords: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Check that a batch can be split into equal microbatches, and return its tensors by name.

    The names are ``input 0``, ``input 1``, ..., ``target``, and the keywords, in this order. All
    tensors have the rows of the batch in dimension 0.

    Raises:
        ValueError: The batch cannot be split, or a keyword is a parameter of torch's runtime.
    """
    tensors = {f"input {number}": tensor for number, tensor in enumerate(inputs)}
    tensors |= {} if target is None else {"target": target}
    if taken := _TAKEN.intersection(keywords):
        raise ValueError(
            f"keywords has {listed(sorted(taken))}, which torch's runtime takes itself: give it "
            "another name"
        )
    tensors |= keywords
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.dim():
            kind = f"of type {type(tensor).__name__}"
            kind = "a tensor without dimensions" if isinstance(tensor, Tensor) else kind
            raise ValueError(f"{name} is {kind}: give a tensor with rows of the batch")
    sizes = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        rows = ", ".join(f"{name} has {size} rows" for name, size in sizes.items())
        raise ValueError(f"{rows}: give all of them the same rows")
    # Unequal microbatches would make the mean of their losses differ from the batch's mean.
    for name, size in sizes.items():
        if size < 1 or size % n_micro:
            raise ValueError(
                f"{name} has {size} rows, which {n_micro} microbatches do not divide: give a "
                f"multiple of {n_micro}"
            )
    return tensors


class CollectivesBeside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that refuses collectives among several ranks of a pipeline.

    The ranks of a pipeline run different passes at the same time, so that they would wait for each
    other forever. Collectives among ranks of different pipelines that have the same stage, as in
    expert or tensor parallelism, are allowed: these ranks run the same passes in the same order.

    Args:
        group: The ranks of the pipeline; None for the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks = set(dist.get_process_group_ranks(group))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # ``c10d`` has the operators of torch.distributed, ``_c10d_functional`` those of functional
        # collectives. Sends and receives between ranks of a pipeline are its own.
        space, _, name = func.overloadpacket._qualified_op_name.partition("::")
        if space in ("c10d", "_c10d_functional") and not name.startswith(("send", "recv", "wait")):
            names = (argument.name for argument in func._schema.arguments)
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            shared = self._ranks & _ranks_of(given)
            if len(shared) > 1:
                ranks = listed([str(rank) for rank in sorted(shared)])
                raise RuntimeError(
                    f"a stage starts the collective {name} inside a pass, with ranks {ranks} of "
                    "its pipeline, which run other passes at that time: they would wait forever. "
                    "Reduce outside of the schedule's step, or within a group that has one rank of "
                    "each pipeline"
                )
        return func(*args, **(kwargs or {}))


def _ranks_of(given: Mapping[str, Any]) -> set[int]:
    """Return the ranks of the process group among the arguments of a collective's operator."""
    # ``c10d`` operators take the group itself, functional ones its name. The name's resolver is
    # private in torch 2.13 to 2.15.
    if "process_group" in given:
        group = dist.ProcessGroup.unbox(given["process_group"])
    elif "group_name" in given:
        resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
        group = resolve(given["group_name"])
    else:
        return set()
    return set(dist.get_process_group_ranks(group))


@contextmanager
def kept_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the buffers of modules, such as running means, after the block."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    # Restored in place, so that other references to the buffers stay valid.
    before = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
