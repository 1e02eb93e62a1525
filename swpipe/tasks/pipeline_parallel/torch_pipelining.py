"""Everything used of torch's runtime. Most of it is private, so the version is checked first.

``torch.distributed.pipelining`` runs a schedule by ``_PipelineScheduleRuntime``, whose methods and
rules change from release to release.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

TESTED = ("2.13", "2.14", "2.15")
"""The releases of torch whose runtime was tested."""


def check_torch(version: str) -> None:
    """Refuse a torch whose runtime was not tested.

    Raises:
        ImportError: It is another release.
    """
    series = re.match(r"\d+\.\d+", version)
    if series is None or series[0] not in TESTED:
        tested = ", ".join(TESTED)
        raise ImportError(
            f"torch {version} is installed, but swpipe.tasks.pipeline_parallel uses private parts "
            f"of torch.distributed.pipelining and was tested with {tested}: install one of them"
        )


check_torch(torch.__version__)

from torch.distributed.pipelining import PipelineStage, schedules  # noqa: E402
from torch.nn.parallel import distributed  # noqa: E402

TorchAction: Any = schedules._Action
TorchRuntime: Any = schedules._PipelineScheduleRuntime
Stage: Any = PipelineStage

OPS: Any = {
    "F": schedules.FORWARD,
    "I": schedules.BACKWARD_INPUT,
    "W": schedules.BACKWARD_WEIGHT,
    "B": schedules.FULL_BACKWARD,
}
"""swpipe's op to torch's."""

COMMUNICATION: Any = {
    op.value: op
    for op in (
        schedules.UNSHARD,
        schedules.RESHARD,
        schedules.REDUCE_GRAD,
        schedules.SEND_F,
        schedules.RECV_F,
        schedules.SEND_B,
        schedules.RECV_B,
    )
}
"""The same of communication."""

BACKWARD: Any = (OPS["I"], OPS["W"], OPS["B"], schedules.REDUCE_GRAD)
"""Ops that an evaluation leaves out."""

OVERLAP: Any = schedules.OVERLAP_F_B


def lower(runtime: Any, rows: dict[int, list[Any]], placement: Sequence[int]) -> None:
    """Have a runtime run these rows, to which the communication is added that they lack.

    Torch's own ``_prepare_schedule_with_comms`` takes rows with all communication, or with none.
    """
    passes = {rank: [one for one in row if one.is_compute_op] for rank, row in rows.items()}
    runtime._validate_and_set_stage_mapping(passes)
    there = {one.computation_type for row in rows.values() for one in row}
    if schedules.UNSHARD not in there:
        rows = {rank: schedules._add_unshard_reshard(row) for rank, row in rows.items()}
    if schedules.REDUCE_GRAD not in there:
        n_micro = runtime._n_microbatches
        rows = {rank: schedules._add_reduce_grad(row, n_micro) for rank, row in rows.items()}
    if there.isdisjoint((schedules.SEND_F, schedules.SEND_B)):
        rows = schedules._add_send_recv(rows, placement.__getitem__, len(placement))
    runtime.pipeline_order_with_comms = rows


find_tensors: Any = distributed._find_tensors
"""In values of any structure, as DistributedDataParallel looks for them."""

wait_for: Any = schedules._wait_batch_p2p
"""For sends or receives that were started."""


def group_like(group: dist.ProcessGroup, device: torch.device, name: str) -> dist.ProcessGroup:
    """Make another group of the same ranks, all of which call this with the same name.

    ``new_group`` does so for a part of the ranks under a name that it derives from how many groups
    each of them is in: where these numbers differ, the ranks wait for each other for ever.
    """
    ranks = dist.get_process_group_ranks(group)
    options: Any = group._get_backend(device).options
    helper: Any = distributed_c10d._new_process_group_helper
    made: dist.ProcessGroup
    made, _ = helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        str(dist.get_backend_config(group)),
        distributed_c10d._get_default_store(),
        name,
        timeout=options._timeout,
    )
    distributed_c10d._world.pg_group_ranks[made] = {rank: at for at, rank in enumerate(ranks)}
    return made
