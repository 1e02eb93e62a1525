"""Models of the kinds that TorchRec's users build, on its own modules, sharded over all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.tasks.torchrec.models import (
    BATCH,
    CPU,
    DENSE,
    DIM,
    TABLES,
    Batch,
    KeyedJaggedTensor,
    bags,
    batches,
    in_backward_optimizer_filter,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.distributed import DistributedModelParallel, embedding_tower_sharding
    from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward


class _Head(nn.Module):
    """A dense part over tables whose embeddings have some width, and are keyed or a tensor."""

    keyed = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bottom = nn.Linear(DENSE, DIM)
        self.top = nn.Linear(DIM + width, 1)
        self.criterion = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        embedded = self.tables(batch.ids)
        found = embedded.values() if self.keyed else embedded
        logits = self.top(torch.cat([self.bottom(batch.dense), found], dim=1)).squeeze(1)
        return self.criterion(logits, batch.labels), logits.detach()


class Processed(_Head):
    """Bags behind feature processors, which have parameters of their own."""

    def __init__(self) -> None:
        super().__init__(DIM * TABLES)
        lengths = {f"f{t}": 8 for t in range(TABLES)}
        processors = PositionWeightedModuleCollection(lengths, device=CPU)
        self.tables = FeatureProcessedEmbeddingBagCollection(
            bags(range(TABLES), weighted=True), processors
        )


class _Interaction(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, DIM)

    def forward(self, embedded: Any) -> Tensor:
        return self.layer(embedded.values())


class Towers(_Head):
    """Towers: each has tables, and an interaction that runs on the rank of its tables."""

    keyed = False

    def __init__(self) -> None:
        super().__init__(2 * DIM)
        towers = [
            EmbeddingTower(bags(part), _Interaction(DIM * len(part)))
            for part in (range(2), range(2, TABLES))
        ]
        self.tables = EmbeddingTowerCollection(towers)


ZOO: dict[str, Callable[[], nn.Module]] = {
    "feature processors": Processed,
    "towers": Towers,
}


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Of all that no fused one updates."""
    named = in_backward_optimizer_filter(model.named_parameters())
    return torch.optim.Adam([parameter for _, parameter in named], lr=0.01)


def data(name: str, count: int) -> Iterator[Batch]:
    """Batches that the model takes."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    for batch in batches(count):
        if name == "feature processors":
            weights = torch.rand(len(batch.ids.values()), generator=draws)
            batch.ids = KeyedJaggedTensor(
                batch.ids.keys(), batch.ids.values(), weights, lengths=batch.ids.lengths()
            )
        yield batch


def _ddp_on_cpu(module: nn.Module, device_ids: Any = None, **options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, **options)


def sharded(name: str) -> nn.Module:
    """The model over all ranks, with fused tables, as TorchRec's planner shards it."""
    torch.manual_seed(5)
    model = ZOO[name]()
    optimized = [p for name, p in model.named_parameters() if "embedding_bags" in name]
    apply_optimizer_in_backward(torch.optim.SGD, optimized, {"lr": 0.1})
    sharders: list[Any] = [
        EmbeddingTowerCollectionSharder(),
        FeatureProcessedEmbeddingBagCollectionSharder(),
    ]
    world = dist.get_world_size()
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    # TorchRec names the device of a tower's DDP, which is an error on a CPU.
    embedding_tower_sharding.DistributedDataParallel = _ddp_on_cpu
    return DistributedModelParallel(model, env, CPU, plan, sharders=sharders)
