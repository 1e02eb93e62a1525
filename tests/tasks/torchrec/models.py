"""A small recommender on sharded tables, its batches, and TorchRec's results for them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe.tasks.torchrec import _torchrec  # noqa: F401 - quiets what follows

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        KeyedJaggedTensor,
    )
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
    from torchrec.streamable import Pipelineable

CPU = torch.device("cpu")
ROWS, DIM, TABLES, BATCH, DENSE = 64, 8, 4, 6, 5


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]
    """One rank's part of a batch."""

    dense: Tensor
    ids: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.ids.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def work(self) -> Tensor:
        """Return the ids per row, as floats, which a shuffler balances."""
        return self.ids.lengths().view(TABLES, -1).sum(0).float()

    def record_stream(self, stream: Any) -> None:
        for part in (self.dense, self.ids, self.labels):
            part.record_stream(stream)


@dataclass(frozen=True)
class Job:
    """A job: the sharding of the tables, whether they are pooled, and the optimizer.

    Attributes:
        sharding: The sharding of the tables.
        pooled: Bags (one embedding per row and table), or collections (one per id).
        optimizer: The optimizer of tables and dense parameters.
        fused: The tables' is fused into backward; never where they are data-parallel.
        modules: Over how many sharded modules the tables are spread.
        options: The options of the optimizer.
    """

    sharding: str = "table_wise"
    pooled: bool = True
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    fused: bool = True
    modules: int = 1
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1})


def batches(count: int, seed: int = 0, rank: int | None = None) -> Iterator[Batch]:
    """Yield this rank's part of ``count`` batches; empty bags and repeated ids occur."""
    rank = dist.get_rank() if rank is None else rank
    draws = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(count):
        lengths = torch.randint(0, 4, (TABLES * BATCH,), generator=draws)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draws)
        keys = [f"f{t}" for t in range(TABLES)]
        yield Batch(
            torch.rand(BATCH, DENSE, generator=draws),
            KeyedJaggedTensor.from_lengths_sync(keys, ids, lengths),
            torch.randint(0, 2, (BATCH,), generator=draws).float(),
        )


class Model(nn.Module):
    """A model of a bottom network, embeddings and a top network; returns (loss, logits)."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        share = TABLES // job.modules
        kind: Any = bags if job.pooled else collection
        self.tables = nn.ModuleList(
            kind(range(share * m, share * (m + 1))) for m in range(job.modules)
        )
        self.bottom = nn.Sequential(nn.Linear(DENSE, DIM), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(DIM * (TABLES + 1), DIM), nn.ReLU(), nn.Linear(DIM, 1))
        self.pool = _Pool() if not job.pooled else None
        self.criterion = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        dense = self.bottom(batch.dense)
        parts = [dense]
        for table in self.tables:
            embedded = table(batch.ids)
            parts.append(embedded.values() if self.pool is None else self.pool(embedded))
        logits = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return self.criterion(logits, batch.labels), logits.detach()


class _Pool(nn.Module):
    """Sum each row's embeddings, for tables that do not pool."""

    def forward(self, embedded: Any) -> Tensor:
        return torch.cat(
            [
                torch.stack(
                    [part.sum(0) for part in jagged.values().split(jagged.lengths().tolist())]
                )
                for jagged in embedded.values()
            ],
            dim=1,
        )


def bags(which: Iterable[int], *, weighted: bool = False) -> EmbeddingBagCollection:
    """Return pooled tables by number, with one feature each."""
    made = [EmbeddingBagConfig(**_config(t)) for t in which]
    return EmbeddingBagCollection(tables=made, is_weighted=weighted, device=CPU)


def collection(which: Iterable[int]) -> EmbeddingCollection:
    """Return tables that are not pooled."""
    return EmbeddingCollection(tables=[EmbeddingConfig(**_config(t)) for t in which], device=CPU)


def _config(t: int) -> dict[str, Any]:
    names = {"name": f"t{t}", "feature_names": [f"f{t}"]}
    return {**names, "num_embeddings": ROWS, "embedding_dim": DIM}


def plain_model(job: Job, seed: int = 7) -> Model:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(seed)
    model = Model(job)
    for parameter in model.tables.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def sharded(job: Job, model: nn.Module | None = None, *, ddp: bool = True) -> nn.Module:
    """Return the model sharded over all ranks, with the tables' optimizer fused into backward.

    ``ddp`` wraps the rest in torch's DDP.
    """
    model = plain_model(job) if model is None else copy.deepcopy(model)
    world = dist.get_world_size()
    fused = job.sharding != "data_parallel" and job.fused
    if fused:
        apply_optimizer_in_backward(job.optimizer, model.tables.parameters(), dict(job.options))
    kernel = {"compute_kernel": None if fused else "dense"}
    per_table = {
        "table_wise": lambda t: table_wise(rank=t % world, **kernel),
        "in_order": lambda t: table_wise(rank=t * world // TABLES, **kernel),
        "row_wise": lambda _: row_wise(**kernel),
        "column_wise": lambda t: column_wise(ranks=[t % world, (t + 1) % world], **kernel),
        "data_parallel": lambda _: data_parallel(),
    }[job.sharding]
    sharder: Any = EmbeddingBagCollectionSharder() if job.pooled else EmbeddingCollectionSharder()
    share = TABLES // job.modules
    plan = ShardingPlan(
        {
            f"tables.{m}": construct_module_sharding_plan(
                tables,
                {f"t{t}": per_table(t) for t in range(share * m, share * (m + 1))},
                sharder=sharder,
                local_size=world,
                world_size=world,
                device_type="cpu",
            )
            for m, tables in enumerate(model.tables)
        }
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(
        model, env, CPU, plan, sharders=[sharder], init_data_parallel=ddp
    )


def dense_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters that no fused one updates."""
    named = in_backward_optimizer_filter(model.named_parameters())
    return job.optimizer([parameter for _, parameter in named], **job.options)


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of this rank's shard of all parameters and buffers."""
    return {name: value.clone() for name, value in _own(model).items()}


def put_back(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Restore what ``everything`` returned."""
    for name, value in _own(model).items():
        value.copy_(values[name])


def _own(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, value in model.state_dict().items():
        shards = value.local_shards() if hasattr(value, "local_shards") else None
        if shards is None:
            found[name] = value.detach()
        else:
            found |= {f"{name}[{k}]": s.tensor.detach() for k, s in enumerate(shards)}
    return found


def keyed_dense(model: nn.Module) -> Any:
    """Return TorchRec's wrapper around SGD for all parameters that are not fused."""
    named = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(named, lambda params: torch.optim.SGD(params, lr=0.1))


def combined(model: nn.Module) -> Any:
    """Return the fused and the dense optimizer combined, as in TorchRec's examples."""
    return CombinedOptimizer([model.fused_optimizer, keyed_dense(model)])


def warmed_up(model: nn.Module) -> Any:
    """Return an optimizer whose rate changes in every step."""
    stages = [
        WarmupStage(WarmupPolicy.LINEAR, max_iters=5, value=0.1),
        WarmupStage(WarmupPolicy.POLY, max_iters=100, value=2.0, decay_iters=50),
    ]
    return WarmupOptimizer(combined(model), stages, lr=0.3)
