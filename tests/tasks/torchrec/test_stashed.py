"""Tables or the optimizer's state are on the host between uses, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from swpipe._values.stateful import modules_in
from swpipe.device import CpuDevice
from swpipe.device.offload import Offload
from swpipe.tasks import torchrec as ours
from swpipe.tasks.torchrec._torchrec import torchrec_class
from swpipe.tasks.torchrec.pipelines import stashed
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    batches,
    dense_optimizer,
    everything,
    sharded,
)
from tests.tasks.torchrec.trial import Outcome, by_torchrec

STEPS = 6
OPT, EMB = "TrainPipelineSparseDistOptStash", "TrainPipelineSparseDistEmbStash"
EMS = "TrainPipelinePrefetchEMS"

if torchrec_class(EMB) is None:
    pytest.skip("this TorchRec has no pipelines that stash", allow_module_level=True)


class Moving(CpuDevice):
    """A CPU on which an offload moves memory, as if it had streams."""

    has_streams = True


class Watched:
    """The offloads that a pipeline makes, and their bytes on the device over time."""

    def __init__(self) -> None:
        self.pairs: list[Offload] = []
        self.dense: list[int] = []
        self.body: list[int] = []

    def pair(self, name: str, after: str, before: str, device: Any, **options: Any) -> Offload:
        self.pairs.append(Offload(name, after, before, Moving(), least_bytes=1, **options))
        return self.pairs[-1]

    def bytes(self) -> int:
        block = self.pairs[-1].resident()
        assert block is not None
        return block.bytes


@contextmanager
def watched() -> Iterator[Watched]:
    """Let the stashing pipelines move memory of this CPU within the block."""
    seen = Watched()
    with mock.patch.object(stashed, "Offload", seen.pair):
        yield seen


def to_be_stashed(job: Job) -> nn.Module:
    """Return the job's model, with its first table marked as in TorchRec's configurations."""
    model = sharded(job)
    for part in modules_in(model):
        for table in getattr(getattr(part, "_config", None), "embedding_tables", ()):
            table.stash_weights = True
    return model


def trained(
    name: str, job: Job, made: Callable[[Job], nn.Module] = to_be_stashed
) -> tuple[list[str], list[int], list[int]]:
    """Return the differences of a class from TorchRec's base, and the bytes at two places."""
    wanted = by_torchrec(job, batches(STEPS), made(job))
    model = made(job)

    def forward(batch: Batch) -> Any:
        seen.dense.append(seen.bytes())
        return model(batch)

    with watched() as seen:
        pipeline = getattr(ours, name)(
            model, dense_optimizer(job, model), CPU, site_fqn="top", custom_model_fwd=forward
        )
        data, outputs = batches(STEPS), []
        with pipeline:
            for _ in range(STEPS):
                outputs.append(pipeline.progress(data))
                seen.body.append(seen.bytes())
        return Outcome(outputs, everything(model)).differences(wanted), seen.dense, seen.body


def test_tables_are_away_during_the_dense_part_alone(two_ranks: Ranks) -> None:
    """Training equals TorchRec's base; between two calls the tables are complete."""
    for sharding in ("table_wise", "row_wise"):
        for differences, dense, body in two_ranks.run(trained, EMB, Job(sharding)):
            assert differences == []
            assert set(dense) == {0}
            assert min(body) > 0


class Kernel(nn.Module):
    """A stand-in for a kernel of tables in host memory, whose cache fbgemm fills on a GPU only."""

    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__()
        self._emb_module = nn.Module()
        self._emb_module.lxu_cache_weights = cache


def _cached() -> tuple[list[str], set[int], int, set[float]]:
    """Return the results of a training with a cache, and the cache's final values."""
    cache = torch.full((8, 4), 7.0)

    def cached(job: Job) -> nn.Module:
        model: Any = sharded(job)
        model.module.tables[0].kernel = Kernel(cache)
        return model

    differences, dense, body = trained(EMS, Job(), cached)
    return differences, {*dense}, min(body), {*cache.flatten().tolist()}


@pytest.mark.skipif(torchrec_class(EMS) is None, reason="this TorchRec has no such class")
def test_caches_are_away_during_the_dense_part_alone(two_ranks: Ranks) -> None:
    """They are restored with their values; tables that are not marked stay."""
    for differences, dense, body, values in two_ranks.run(_cached):
        assert differences == []
        assert dense == {0}
        assert body > 0
        assert values == {7.0}


def test_the_optimizers_state_is_away_until_its_step(two_ranks: Ranks) -> None:
    """Training is equal with moments of Adam; from the second batch on there is some to move."""
    job = Job(optimizer=torch.optim.Adam, options={"lr": 0.01}, fused=False)
    for differences, dense, body in two_ranks.run(trained, OPT, job):
        assert differences == []
        assert set(dense) == {0}
        assert min(body) > 0


def _warned() -> str:
    model = sharded(Job())
    with pytest.warns(RuntimeWarning, match="no table of this rank") as caught:
        getattr(ours, EMB)(model, dense_optimizer(Job(), model), CPU, site_fqn="top").close()
    return str(caught[0].message)


def test_a_model_without_marked_tables_is_told(two_ranks: Ranks) -> None:
    """TorchRec would silently move nothing."""
    for message in two_ranks.run(_warned):
        assert "stash_weights=True" in message
