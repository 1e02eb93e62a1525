"""What must hold before a schedule, a chunk or a batch runs on torch's runtime."""

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
"""Costs under which the checker looks at the order alone."""


_TAKEN = frozenset({"target", "losses", "return_outputs", "loss_kwargs"})


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
    """Check the chunks of the model that a rank has.

    Args:
        schedule: The schedule.
        rank: In the group of the pipeline.
        chunks: Stage to module.
        ranks: Of the pipeline, in the default group.

    Raises:
        ScheduleError: They are not those of the rank's stages, share a parameter, or are wrapped
            for data parallelism in a way in which ranks would wait for each other.
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
            own = f"{name} of stage {stage}"
            if (other := owner.setdefault(id(parameter), own)) != own:
                raise ScheduleError(
                    f"{own} is {other}: the runtime would scale its gradient twice, before it is "
                    "complete; give each stage parameters of its own"
                )


def _check_data_parallel(
    chunk: nn.Module, stage: int, ranks: Sequence[int], *, has_split: bool
) -> None:
    """A chunk may be wrapped as a whole, over ranks that have the same stage in other pipelines."""
    for name, module in chunk.named_modules():
        is_wrapper = isinstance(module, DistributedDataParallel | FSDPModule)
        inside = name and not (isinstance(module, FSDPModule) and isinstance(chunk, FSDPModule))
        if is_wrapper and inside:
            raise ScheduleError(
                f"stage {stage}: {name} is a {type(module).__name__} inside of a chunk that is "
                "none, and would reduce after each microbatch: wrap the chunk as a whole"
            )
    if not isinstance(chunk, DistributedDataParallel):
        return
    shared = set(ranks).intersection(dist.get_process_group_ranks(chunk.process_group))
    if len(shared) > 1:
        raise ScheduleError(
            f"stage {stage}: the chunk is a DistributedDataParallel over ranks "
            f"{listed([str(one) for one in sorted(shared)])} of the pipeline, each of which has "
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
    """Check that a batch can be split into microbatches of equal size; its tensors by name.

    Raises:
        ValueError: It cannot.
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
            found = "a tensor without dimensions" if isinstance(tensor, Tensor) else kind
            raise ValueError(f"{name} is {found}: give a tensor with rows of the batch")
    sizes = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{name} has {size} rows" for name, size in sizes.items())
        raise ValueError(f"{told}: give all of them the same rows")
    for name, size in sizes.items():
        if size < 1 or size % n_micro:
            raise ValueError(
                f"{name} has {size} rows, which {n_micro} microbatches do not divide: give a "
                f"multiple of {n_micro}"
            )
    return tensors


class CollectivesBeside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse collectives in which two ranks of a pipeline take part.

    Each of its ranks is at another pass than the others, which would wait for ever. Ranks that
    share a stage, as those of experts or tensors across pipelines, run the same passes in the same
    order, and pass.

    Args:
        group: The pipeline's ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks = set(dist.get_process_group_ranks(group))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.overloadpacket._qualified_op_name.partition("::")
        if space in ("c10d", "_c10d_functional") and not name.startswith(("send", "recv", "wait")):
            names = (argument.name for argument in func._schema.arguments)
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            shared = self._ranks & _ranks_of(given)
            if len(shared) > 1:
                ranks = listed([str(rank) for rank in sorted(shared)])
                raise RuntimeError(
                    f"a stage starts the collective {name} inside a pass, with ranks {ranks} of "
                    "its pipeline, each of which is at another pass: they would wait for ever. "
                    "Reduce outside of the schedule's step, or within a group that has one rank of "
                    "each pipeline"
                )
        return func(*args, **(kwargs or {}))


def _ranks_of(given: Mapping[str, Any]) -> set[int]:
    """Of the group that a collective's operator is given: the group itself, or its name."""
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
    """Give buffers, such as running means, the values back that they had before the block."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    before = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
