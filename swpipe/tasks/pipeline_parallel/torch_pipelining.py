"""The parts of torch.distributed.pipelining that swpipe uses, for the tested releases of torch.

Most of these parts are private. ``_PipelineScheduleRuntime``, which runs a schedule, changes its
methods and rules from release to release. Therefore the version is checked on import.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from swpipe.plans.pipeline_parallel import PipelineSchedule

TESTED = ("2.13", "2.14", "2.15")
"""The releases of torch with which swpipe is tested."""


def check_torch(version: str) -> None:
    """Check that swpipe is tested with a version of torch.

    Raises:
        ImportError: The version belongs to another release.
    """
    series = re.match(r"\d+\.\d+", version)
    if series is None or series[0] not in TESTED:
        tested = ", ".join(TESTED)
        raise ImportError(
            f"torch {version} is installed, but swpipe.tasks.pipeline_parallel uses private parts "
            f"of torch.distributed.pipelining and was tested with {tested}: install one of them"
        )


# Before the imports below, which fail with a less helpful error if a private name has moved.
check_torch(torch.__version__)

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.fsdp._fully_shard import _fsdp_collectives  # noqa: E402
from torch.distributed.pipelining import PipelineStage, schedules  # noqa: E402
from torch.nn.parallel import distributed  # noqa: E402

TorchRuntime: Any = schedules._PipelineScheduleRuntime
Stage: Any = PipelineStage

REDUCE_GRAD: Any = schedules.REDUCE_GRAD
OVERLAP: Any = schedules.OVERLAP_F_B

BACKWARD: Any = (
    schedules.BACKWARD_INPUT,
    schedules.BACKWARD_WEIGHT,
    schedules.FULL_BACKWARD,
    schedules.REDUCE_GRAD,
)
"""The ops that do nothing in an evaluation."""


def lower(runtime: Any, schedule: PipelineSchedule) -> None:
    """Set the rows that a runtime runs, after adding the kinds of communication that they lack.

    Args:
        runtime: The torch runtime, which is changed.
        schedule: The schedule of all ranks.
    """
    # Torch's ``_prepare_schedule_with_comms`` (2.13 to 2.15) takes rows with all communication, or
    # with none. These are its steps; collectives are added only if their kind is missing.
    rows = _of_torch(schedule)
    runtime._validate_and_set_stage_mapping(_of_torch(schedule.passes))
    ops = {entry.computation_type for row in rows.values() for entry in row}
    if schedules.UNSHARD not in ops:
        rows = {rank: schedules._add_unshard_reshard(row) for rank, row in rows.items()}
    if REDUCE_GRAD not in ops:
        n_micro = schedule.n_micro
        rows = {rank: schedules._add_reduce_grad(row, n_micro) for rank, row in rows.items()}
    placement = schedule.placement
    runtime.pipeline_order_with_comms = schedules._add_send_recv(
        rows, placement.__getitem__, len(placement)
    )


def _of_torch(schedule: PipelineSchedule) -> dict[int, list[Any]]:
    """Return torch's actions by rank: the texts of entries are the same in swpipe and in torch."""
    return {
        rank: [schedules._Action.from_str(str(entry)) for entry in row]
        for rank, row in enumerate(schedule.rows)
    }


find_tensors: Any = distributed._find_tensors
"""The function by which DistributedDataParallel finds the tensors in a value of any structure."""

DefaultReduceScatter: Any = _fsdp_collectives.DefaultReduceScatter
"""The reduce-scatter that FSDP uses unless a custom one is set."""


def sharded_groups(chunk: nn.Module) -> Iterator[tuple[FSDPModule, Any]]:
    """Yield the FSDP modules of a chunk, each with its private group of parameters."""
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            groups: Any = module._get_fsdp_state()._fsdp_param_groups  # torch 2.13 to 2.15
            # A module with several groups takes no custom reduce-scatter.
            if len(groups) == 1:
                yield module, groups[0]


wait_for: Any = schedules._wait_batch_p2p
"""The function by which torch's runtime waits for a batch of sends or receives."""


def group_like(group: dist.ProcessGroup, device: torch.device, name: str) -> dist.ProcessGroup:
    """Make a process group with the ranks and the backend of another group.

    This is a collective: all ranks of the group call this function, with the same name.

    Args:
        group: The group whose ranks and backend to use.
        device: A device whose backend in ``group`` has the time-out to use.
        name: A name that no other group of the job has.
    """
    # ``new_group`` derives the name of a group of some of the job's ranks from how many groups each
    # rank is in. If these numbers differ, the ranks wait for each other forever. The private helper
    # takes a name (torch 2.13 to 2.15).
    ranks = dist.get_process_group_ranks(group)
    options: Any = group._get_backend(device).options
    helper: Any = distributed_c10d._new_process_group_helper
    new: dist.ProcessGroup
    new, _ = helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        str(dist.get_backend_config(group)),
        distributed_c10d._get_default_store(),
        name,
        timeout=options._timeout,
    )
    # The helper leaves this table to its caller.
    distributed_c10d._world.pg_group_ranks[new] = {rank: at for at, rank in enumerate(ranks)}
    return new
