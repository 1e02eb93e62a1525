"""Stages that are sharded or replicated over the ranks of other pipelines."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from swpipe.plans.pipeline_parallel import (
    PipelineSchedule,
    ScheduleError,
    place_collectives,
    torch_schedule,
)
from swpipe.tasks.pipeline_parallel import PipelineRuntime
from tests.support.ranks import Ranks

SIZE, N_MICRO, STEPS = 6, 4, 2


@dataclass(frozen=True)
class Mesh:
    """Two pipelines of two ranks: the ranks of this one, and those with the same stages."""

    pipeline: Any
    replicas: Any
    sharded: Any
    rank: int
    replica: int


def mesh() -> Mesh:
    """Make the groups of 2 x 2 ranks."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "replica"))
    pipeline, replicas = both["pipeline"], both["replica"]
    return Mesh(
        pipeline.get_group(),
        replicas.get_group(),
        replicas,
        pipeline.get_local_rank(),
        replicas.get_local_rank(),
    )


def chunk(stage: int, kind: str, where: Mesh) -> nn.Module:
    """Make the chunk of a stage, the same on all ranks."""
    torch.manual_seed(stage)
    layers = nn.Sequential(
        nn.Linear(SIZE, SIZE), nn.Tanh(), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)
    )
    if kind == "nested":
        fully_shard(layers[3], mesh=where.sharded)
    if kind != "ddp":
        dtype = torch.float64 if kind == "double" else None
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        sharded = fully_shard(layers, mesh=where.sharded, mp_policy=policy)
        for parameter in sharded.parameters() if kind == "hooked" else ():
            parameter.register_post_accumulate_grad_hook(double)
        return sharded
    return DistributedDataParallel(layers, process_group=where.replicas)


def double(parameter: Tensor) -> None:
    """Change a gradient that has been reduced."""
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss."""
    return (output - target).square().mean()


def values(chunks: dict[int, nn.Module]) -> list[Tensor]:
    """Return the gradients and parameters of the shards of this rank."""
    found = []
    for module in chunks.values():
        for parameter in module.parameters():
            assert parameter.grad is not None
            both = (parameter.grad, parameter.detach())
            found += [getattr(tensor, "_local_tensor", tensor).clone() for tensor in both]
    return found


def torchs_runtime(schedule: PipelineSchedule, chunks: dict[int, nn.Module], where: Mesh) -> Any:
    """Make torch's own runtime, which reads the schedule from a file."""
    stages = [
        PipelineStage(module, stage, schedule.n_stages, torch.device("cpu"), group=where.pipeline)
        for stage, module in chunks.items()
    ]
    made = schedules._PipelineScheduleRuntime(stages, n_microbatches=N_MICRO, loss_fn=squared)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "schedule.csv")
        file.write_text(schedule.to_csv())
        made._load_csv(str(file))
    return made


def trained(kind: str, schedule: PipelineSchedule, ours: bool, where: Mesh) -> list[Tensor]:
    """Train on this runtime or on torch's; return the final shards of this rank."""
    chunks = {
        stage: chunk(stage, kind, where)
        for stage, rank in enumerate(schedule.placement)
        if rank == where.rank
    }
    runtime: Any = (
        PipelineRuntime(schedule, chunks, squared, group=where.pipeline)
        if ours
        else torchs_runtime(schedule.passes, chunks, where)
    )
    optimizer = torch.optim.AdamW(p for module in chunks.values() for p in module.parameters())
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + where.replica)
        x, y = (torch.randn(2 * N_MICRO, SIZE, generator=draw) for _ in range(2))
        if ours:
            runtime.train(x, target=y)
            runtime.evaluate(x, target=y)
        else:
            optimizer.zero_grad()
            inputs = (x,) if 0 in chunks else ()
            target = {"target": y} if schedule.n_stages - 1 in chunks else {}
            runtime.step(*inputs, **target)
        optimizer.step()
        found += values(chunks)
    return found


def different(cases: list[tuple[str, PipelineSchedule]]) -> list[tuple[str, str]]:
    """Return the cases in which this rank's shards differ from those of torch's runtime."""
    where = mesh()
    told = []
    for kind, schedule in cases:
        # Of nested shards torch's runtime loses gradients where it splits the backward pass.
        torchs = "fsdp" if kind == "nested" else kind
        both = [
            trained(kind, schedule, True, where),
            trained(torchs, schedule, False, where),
        ]
        assert len(both[0]) == len(both[1]) > 0
        if not all(map(torch.equal, *both)):
            told.append((kind, str(schedule)))
    return told


def test_sharded_stages_have_the_bits_of_torchs_runtime(four_ranks: Ranks) -> None:
    """Gradients and parameters on 2 x 2 ranks are equal, also with planned collectives."""
    sharded = [torch_schedule(n, 2, N_MICRO) for n in ("1f1b", "zbv", "interleaved_zb")]
    pairs = torch_schedule("dualpipev", 2, N_MICRO)
    cases = [("fsdp", one) for one in (*sharded, pairs)]
    cases += [("nested", place_collectives(one)) for one in sharded[1:]]
    assert four_ranks.run(different, cases, deadline_s=240.0) == [[]] * 4


class Late(dist.Work):
    """A collective that runs when ``wait`` is called, and not before."""

    def __init__(self, run: Callable[[], object], under_way: set[Late]) -> None:
        super().__init__()
        self._run = run
        self._under_way = under_way
        under_way.add(self)

    def wait(self, *timeout: Any) -> bool:
        """Run the collective."""
        self._run()
        self._under_way.remove(self)
        return True


def late_reductions(kinds: tuple[str, ...]) -> list[tuple[str, set[bool], int, bool]]:
    """Return how the reductions of each kind of stages run.

    With the kind: whether they are in the background, the most that are under way at once, and
    whether the shards equal those of torch's runtime.
    """
    where = mesh()
    schedule = torch_schedule("zbv", 2, N_MICRO)
    real = dist.reduce_scatter_single
    background: list[bool] = []
    under_way: set[Late] = set()
    counts: list[int] = []

    def late(*, async_op: bool = False, **arguments: Any) -> Any:
        background.append(async_op)
        result = Late(lambda: real(**arguments), under_way) if async_op else real(**arguments)
        counts.append(len(under_way))
        return result

    found = []
    for kind in kinds:
        background.clear()
        counts.clear()
        with mock.patch.object(dist, "reduce_scatter_single", late):
            ours = trained(kind, schedule, True, where)
        theirs = trained(kind, schedule, False, where)
        same = all(map(torch.equal, ours, theirs))
        found.append((kind, set(background), max(counts), same))
    return found


def test_a_step_waits_for_its_reductions_at_the_end(four_ranks: Ranks) -> None:
    """It does not if FSDP divides or casts the result, or calls hooks with it."""
    expected = [
        ("fsdp", {True}, 1, True),
        ("double", {False}, 0, True),
        ("hooked", {False}, 0, True),
    ]
    kinds = tuple(kind for kind, *_ in expected)
    assert four_ranks.run(late_reductions, kinds, deadline_s=240.0) == [expected] * 4


def unlike_shards(orders: tuple[str, ...]) -> list[str]:
    """Return the orders under which replicated stages do not end as the sharded ones do."""
    where = mesh()
    told = []
    for order in orders:
        schedule = torch_schedule(order, 2, N_MICRO)  # type: ignore[arg-type]
        replicated, shards = (trained(kind, schedule, True, where) for kind in ("ddp", "fsdp"))
        for whole, shard in zip(replicated, shards, strict=True):
            if not torch.equal(whole.chunk(2)[where.replica], shard):
                told.append(order)
    return told


def test_replicated_stages_have_the_bits_of_sharded_ones(four_ranks: Ranks) -> None:
    """Passes may be whole, split or in pairs.

    Torch's runtime is no oracle: its additional run of a pass leaves the reducer armed, which then
    reduces the first microbatch as well, and fails in a later step.
    """
    orders = ("1f1b", "zbv", "dualpipev")
    assert four_ranks.run(unlike_shards, orders, deadline_s=240.0) == [[]] * 4


def refusals() -> list[str]:
    """Return the errors for chunks that are wrapped in other ways, on each of the four ranks."""
    where = mesh()
    schedule = torch_schedule("zbv", 2, N_MICRO)
    told = []
    for kind in ("inside", "across", "unused"):
        chunks: dict[int, nn.Module] = {}
        for stage, rank in enumerate(schedule.placement):
            if rank == where.rank:
                inner = nn.Linear(SIZE, SIZE)
                if kind == "inside":
                    chunks[stage] = nn.Sequential(fully_shard(inner, mesh=where.sharded))
                else:
                    group = where.pipeline if kind == "across" else where.replicas
                    chunks[stage] = DistributedDataParallel(
                        inner, process_group=group, find_unused_parameters=kind == "unused"
                    )
        with pytest.raises(ScheduleError) as error:
            PipelineRuntime(schedule, chunks, squared, group=where.pipeline)
        told.append(str(error.value))
    return told


REFUSED = (
    "0 is a FSDPLinear inside a chunk that is not one",
    "of the pipeline, each of which has other stages",
    "use B instead of I and W",
)


def test_stages_that_would_reduce_inside_a_pass_are_refused(four_ranks: Ranks) -> None:
    """The error is raised on all ranks."""
    for told in four_ranks.run(refusals, deadline_s=240.0):
        for one, words in zip(told, REFUSED, strict=True):
            assert "rank 0: stage 0: " in one
            assert "rank 1: stage 1: " in one
            assert words in one
