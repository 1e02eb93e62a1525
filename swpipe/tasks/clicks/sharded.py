"""The click job on several ranks: its tables sharded by TorchRec, its step the eleven tasks.

What goes through the context, attribute by attribute::

    ctx.batch -- read --> raw -- decode --> frame, rejected -- hash --> spec, batch (tensors)
    batch -- the eleven of swpipe.tasks.torchrec --> losses, loss, output (logits)
    output, batch -- auc --> (histogram)

Reading, decoding and hashing are tasks before the eleven rather than the iterator's work: so they
appear in profiles and timelines, can be shortcut, and may have a thread group of their own.

Each rank trains on its own rows. Batch k of the log is step k // R of rank k % R, R being the
number of ranks, so no row is read twice and all have equally many. An epoch may end with fewer
batches than ranks: ranks without a batch get one without rows, so that no row is left out. A step
minimises the mean over ranks of their mean loss.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe._distributed.rank_checks import gather
from swpipe.core.context import IterContext
from swpipe.core.task import PipelineTask
from swpipe.tasks.clicks._torchrec import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    in_backward_optimizer_filter,
    table_wise,
)
from swpipe.tasks.clicks.config import ClickConfig
from swpipe.tasks.clicks.encode import ClickBatch
from swpipe.tasks.clicks.job import AnyClickJob, Evaluation
from swpipe.tasks.clicks.log import BatchSpec, ClickLog
from swpipe.tasks.clicks.model import ClickModel, click_loss, make_optimizer
from swpipe.tasks.torchrec import EvenData, SparseDistTasks, TrainStep

T = TypeVar("T")

_TABLES = "net.sparse_arch.embedding_bag_collection"


class LossOfBatch(nn.Module):
    """A batch in training: (loss, logits), as TorchRec's pipelines want it.

    Args:
        net: Takes integers and ids, gives logits [B, 1].
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.criterion = _Criterion()

    def forward(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        """The mean loss of the rows with a label, and their logits [B] without a graph."""
        result: tuple[Tensor, Tensor] = self.criterion(
            self.net(batch.dense, batch.ids), batch.labels
        )
        return result


class _Criterion(nn.Module):
    """Separate from the model, since TorchRec traces modules that contain sharded ones."""

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        labelled = logits.squeeze(1)[: len(labels)]
        return click_loss(labelled, labels), labelled.detach()


class ShardedClickJob(AnyClickJob):
    """A click model in training on all ranks of the default process group; each rank makes one.

    The tables go to the ranks one by one, table by table, and are updated inside backward by a
    fused Adagrad; all other parameters are replicated, their gradients averaged. Making a job is a
    collective, and so are iterating, evaluating and ``over_ranks``.

    Args:
        config: What to train on what; ``batch_size`` is each rank's. The data files are scanned for
            line ends here, on every rank.

    Attributes:
        step_tasks: The eleven tasks; their ``rewrite`` says what was pipelined.

    Raises:
        ClickDataError: A data file is missing or empty.
        RuntimeError: There is no process group.
    """

    def __init__(self, config: ClickConfig) -> None:
        super().__init__(config)
        if not dist.is_initialized():
            raise RuntimeError(
                "a sharded click job runs on the ranks of a process group, and there is none: call "
                "torch.distributed.init_process_group() first, under torchrun or with one rank"
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        whole = LossOfBatch(ClickModel(config.model, config.seed).net)
        sharder = EmbeddingBagCollectionSharder()
        self.model = shard_tables(whole, _TABLES, sharder, self.device, config.model.learning_rate)
        self.modules = (self.model,)
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = make_optimizer(list(dense.values()), config.model.learning_rate)
        self.step_tasks = SparseDistTasks(
            self.model, TrainStep([self.optimizer]), device=self.device
        )
        self._even = EvenData("pad", pad=lambda _: BatchSpec(Path(), 0, 0, 1, 0))

    def hash(self, ctx: IterContext) -> None:
        """Ids into buckets, all into tensors on the host, in the place of their address."""
        ctx.spec, ctx.batch = ctx.batch, self._encoded(ctx)

    def update_auc(self, ctx: IterContext) -> None:
        """Count the predictions into the running AUC."""
        self.auc.update(ctx.output, ctx.batch.labels)

    def tasks(self) -> tuple[PipelineTask, ...]:
        """Three that feed, the eleven, and the running AUC, in serial order."""
        return (
            *self._feed(),
            *self.step_tasks.tasks(),
            PipelineTask("auc", self.update_auc, io=[self._histogram()]),
        )

    def spec(self, ctx: Any) -> BatchSpec:
        spec: BatchSpec = ctx.spec
        return spec

    def _share(self, log: ClickLog, steps: int | None = None) -> Iterator[BatchSpec]:
        own = islice(log.batches(steps and steps * self.size), self.rank, None, self.size)
        return iter(self._even.over(replace(spec, step=step) for step, spec in enumerate(own)))

    def over_ranks(self, value: T, /) -> list[T]:
        return gather(value)

    def evaluate(self) -> Evaluation:
        rewrite = self.step_tasks.rewrite
        rewrite.detach()
        try:
            return super().evaluate()
        finally:
            rewrite.attach()

    def _predict(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.model(batch)
        return result

    def close(self) -> None:
        """Restore the model."""
        self.step_tasks.rewrite.detach()


def shard_tables(
    whole: nn.Module, path: str, sharder: Any, device: torch.device, learning_rate: float
) -> nn.Module:
    """A model over all ranks, within DDP; table t on rank t % R.

    Args:
        whole: The model, whose parameters are the same on all ranks.
        path: Where its collection of tables is, which a fused Adagrad updates in backward.
        sharder: For that collection.
        device: Of the ranks.
        learning_rate: Of the tables.
    """
    tables = whole.get_submodule(path)
    initial = {name: value.detach().clone() for name, value in tables.named_parameters()}
    options = {"lr": learning_rate}
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), options)
    size = dist.get_world_size()
    # Parameters are named "embeddings.NAME.weight", or "embedding_bags.NAME.weight".
    plan = construct_module_sharding_plan(
        tables,
        {name.split(".")[1]: table_wise(rank=t % size) for t, name in enumerate(initial)},
        sharder=sharder,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        world_size=size,
        device_type=device.type,
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with warnings.catch_warnings():  # TorchRec gives DDP an argument that has been renamed
        warnings.filterwarnings("ignore", category=FutureWarning)
        sharded: nn.Module = DistributedModelParallel(
            whole, env, device, ShardingPlan({path: plan}), sharders=[sharder]
        )
    # TorchRec draws a sharded table's rows anew; as they were, they depend on the seed alone.
    with torch.no_grad():
        for name, value in sharded.named_parameters():
            if name.startswith(path) and value.numel():
                value.copy_(initial[name.removeprefix(f"{path}.")])
    return sharded
