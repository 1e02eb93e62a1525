"""What must hold before a schedule, a chunk or a batch runs on torch's runtime."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

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
            own = f"{name} of stage {stage}"
            if (other := owner.setdefault(id(parameter), own)) != own:
                raise ScheduleError(
                    f"{own} is {other}: the runtime would scale its gradient twice, before it is "
                    "complete; give each stage parameters of its own"
                )


def check_batch(inputs: Iterable[Tensor], target: Tensor | None, n_micro: int) -> dict[str, Tensor]:
    """Check that a batch can be split into microbatches of equal size; its tensors by name.

    Raises:
        ValueError: It cannot.
    """
    tensors = {f"input {number}": tensor for number, tensor in enumerate(inputs)}
    tensors |= {} if target is None else {"target": target}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.dim():
            raise ValueError(f"{name} is {shown(tensor)}: give a tensor with rows of the batch")
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


@contextmanager
def no_collectives(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Refuse collectives: a rank is at another pass than the others, which would wait for ever.

    The runtime's own sends and receives pass, and all that it exchanges before a stage begins:
    every rank is at the same place then. Stage 0 makes no backward pass here: a collective in it is
    not seen.
    """
    mode: Any = _NoCollectives()  # type: ignore[no-untyped-call]
    with ExitStack() as stack:
        for stage in stages:
            hook = stage.register_forward_pre_hook(mode.begin, prepend=True)
            stack.callback(hook.remove)
        stack.enter_context(mode)
        yield


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    began = False

    def begin(self, *given: Any) -> None:
        self.began = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.overloadpacket._qualified_op_name.partition("::")
        sends = name.startswith(("send", "recv"))
        if self.began and space in ("c10d", "_c10d_functional") and not sends:
            raise RuntimeError(
                f"a stage starts the collective {name} inside a pass, where each rank is at "
                "another one, and would wait for ever: reduce outside of the schedule's step"
            )
        return func(*args, **(kwargs or {}))


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
