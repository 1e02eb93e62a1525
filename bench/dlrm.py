"""TorchRec's DLRM with table-wise sharded tables, and batches as in TorchRec's benchmarks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe.tasks.torchrec import _torchrec  # noqa: F401 - quiets the imports below

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.datasets.utils import Batch as TorchRecBatch
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.optimizers import in_backward_optimizer_filter

CPU = torch.device("cpu")
TABLES_MODULE = "model.sparse_arch.embedding_bag_collection"


@dataclass(frozen=True)
class Size:
    """The sizes of the model and its batches.

    Attributes:
        tables: Embedding tables, dealt to the ranks in turn; one feature each.
        rows: The rows of each table.
        dim: The size of each embedding.
        batch: Rows of a rank's part of a batch.
        ids: Ids per row and feature: 0 to twice that, less one, on average this less a half.
        bottom: Layers of the dense arch.
        top: Layers of the over arch.
        features: Dense features.
    """

    tables: int = 16
    rows: int = 20_000
    dim: int = 32
    batch: int = 512
    ids: int = 8
    bottom: tuple[int, ...] = (256, 128, 32)
    top: tuple[int, ...] = (256, 128, 1)
    features: int = 13


TINY = Size(tables=4, rows=64, dim=8, batch=6, ids=2, bottom=(8, 8), top=(8, 1), features=5)


@dataclass
class Batch(TorchRecBatch):  # type: ignore[misc]
    """TorchRec's batch without streams."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        there = super().to(device, non_blocking)
        return Batch(there.dense_features, there.sparse_features, there.labels)

    def record_stream(self, stream: Any) -> None:
        """Do nothing: the batch is on a CPU."""


def batches(size: Size, count: int, seed: int = 0) -> list[Batch]:
    """Return this rank's part of ``count`` batches."""
    draws = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return [_batch(size, draws) for _ in range(count)]


def endless(size: Size, count: int = 8) -> Iterator[Batch]:
    """Return an iterator that repeats the same ``count`` batches."""
    return itertools.cycle(batches(size, count))


def _batch(size: Size, draws: torch.Generator) -> Batch:
    lengths = torch.randint(0, 2 * size.ids, (size.tables * size.batch,), generator=draws)
    ids = torch.randint(0, size.rows, (int(lengths.sum()),), generator=draws)
    keys = [f"f{t}" for t in range(size.tables)]
    return Batch(
        torch.rand(size.batch, size.features, generator=draws),
        KeyedJaggedTensor.from_lengths_sync(keys, ids, lengths),
        torch.randint(0, 2, (size.batch,), generator=draws).float(),
    )


def sharded_dlrm(size: Size) -> nn.Module:
    """Return a DLRM with the same weights on every rank; its tables are updated in backward."""
    torch.manual_seed(0)
    tables = bags(size, range(size.tables))
    model = DLRMTrain(DLRM(tables, size.features, list(size.bottom), list(size.top)))
    return sharded(model, {TABLES_MODULE: tables})


def bags(size: Size, which: range) -> Any:
    """Return a bag collection of the given tables, with one feature each."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{t}",
                feature_names=[f"f{t}"],
                num_embeddings=size.rows,
                embedding_dim=size.dim,
            )
            for t in which
        ],
        device=CPU,
    )


def sharded(model: nn.Module, collections: Mapping[str, Any]) -> nn.Module:
    """Return the model with sharded tables: each collection's tables go round the ranks."""
    sharder: Any = EmbeddingBagCollectionSharder()
    world = dist.get_world_size()
    plans = {}
    for name, tables in collections.items():
        apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.05})
        plans[name] = construct_module_sharding_plan(
            tables,
            {
                config.name: table_wise(rank=t % world)
                for t, config in enumerate(tables.embedding_bag_configs())
            },
            sharder=sharder,
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of DDP, about how TorchRec calls it
        return DistributedModelParallel(model, env, CPU, ShardingPlan(plans), sharders=[sharder])


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an Adagrad optimizer of all parameters that no fused optimizer updates."""
    named = in_backward_optimizer_filter(model.named_parameters())
    return torch.optim.Adagrad([parameter for _, parameter in named], lr=0.01)


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's shard of all parameters, by name."""
    found = {}
    for name, value in model.state_dict().items():
        shards = value.local_shards() if hasattr(value, "local_shards") else None
        if shards is None:
            found[name] = value.detach()
        else:
            found |= {f"{name}[{k}]": s.tensor.detach() for k, s in enumerate(shards)}
    return found
