"""A small model on a collection of TorchRec that PEC exchanges in two parts, with batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe.tasks.torchrec import _torchrec  # noqa: F401 - quiets what follows

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.datasets.utils import Batch as TorchRecBatch
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.optimizers import in_backward_optimizer_filter

CPU = torch.device("cpu")
FEATURES = 2


class Batch(TorchRecBatch):  # type: ignore[misc]
    """TorchRec's batch without streams."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        there = super().to(device, non_blocking)
        return Batch(there.dense_features, there.sparse_features, there.labels)

    def record_stream(self, stream: Any) -> None:
        """Do nothing: the batch is on a CPU."""


class Model(nn.Module):
    """A model of sums of each row's embeddings, and a network; returns (loss, logits).

    ``work`` is called in the network's forward and in its backward.
    """

    def __init__(self, rows: int, dim: int, work: Any = None) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(
                name=f"t{n}", feature_names=[f"f{n}"], num_embeddings=rows, embedding_dim=dim
            )
            for n in range(FEATURES)
        ]
        self.tables = PECEmbeddingCollection(EmbeddingCollection(tables=tables, device=CPU))
        self.net = nn.Sequential(nn.Linear(FEATURES * dim, 32), nn.ReLU(), nn.Linear(32, 1))
        self.network = _Network(self.net, work)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.network(self.tables(batch.sparse_features), batch.labels)  # type: ignore[no-any-return]


class _Network(nn.Module):
    """All that comes after the tables, as one leaf of a trace."""

    def __init__(self, net: nn.Module, work: Any) -> None:
        super().__init__()
        self.net, self.work = net, work

    def forward(self, embedded: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        sums = [
            torch.stack([part.sum(0) for part in jagged.values().split(jagged.lengths().tolist())])
            for jagged in embedded.values()
        ]
        joined = torch.cat(sums, dim=1)
        if self.work is not None:
            self.work()
            if joined.requires_grad:
                joined.register_hook(lambda gradient: self.work())
        logits = self.net(joined).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels), logits.detach()


def sharded(
    rows: int = 64,
    dim: int = 8,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    work: Any = None,
) -> nn.Module:
    """Return a model with the same weights on every rank, with its rows sharded."""
    torch.manual_seed(3)
    model = Model(rows, dim, work)
    for parameter in model.tables.parameters():
        nn.init.normal_(parameter, std=0.1)
    apply_optimizer_in_backward(optimizer, model.tables.parameters(), {"lr": 0.1})
    sharder: Any = PECEmbeddingCollectionSharder()
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        model.tables,
        {f"t{n}": row_wise() for n in range(FEATURES)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of DDP, about how TorchRec calls it
        return DistributedModelParallel(
            model, env, CPU, ShardingPlan({"tables": plan}), sharders=[sharder]
        )


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an SGD optimizer of all parameters that no fused optimizer updates."""
    named = in_backward_optimizer_filter(model.named_parameters())
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.05)


def batches(
    count: int, rows: int = 64, batch: int = 6, ids: int = 3, shared: float = 0.3
) -> Iterator[Batch]:
    """Yield this rank's part of batches that share some ids with the previous batch."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    last: Tensor | None = None
    for _ in range(count):
        lengths = torch.full((FEATURES * batch,), ids)
        values = torch.randint(0, rows, (int(lengths.sum()),), generator=draws)
        if last is not None:
            again = torch.rand(len(values), generator=draws) < shared
            values[again] = last[again]
        last = values
        keys = [f"f{n}" for n in range(FEATURES)]
        yield Batch(
            torch.zeros(batch, 1),
            KeyedJaggedTensor.from_lengths_sync(keys, values, lengths),
            torch.randint(0, 2, (batch,), generator=draws).float(),
        )


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of this rank's shard of all parameters."""
    found = {}
    for name, value in model.state_dict().items():
        shards = value.local_shards() if hasattr(value, "local_shards") else None
        parts = [value] if shards is None else [shard.tensor for shard in shards]
        found |= {f"{name}[{k}]": part.detach().clone() for k, part in enumerate(parts)}
    return found
