"""HSTU in training: the model, its data, the fourteen tasks and the running AUC.

On several ranks the tables are sharded, table by table, and updated inside backward; all other
parameters are replicated. Batch k of an epoch is step k // R of rank k % R, R being the number of
ranks. Where users do not fill the batches, histories without events do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from swpipe._distributed.rank_checks import gather
from swpipe.core.context import IterContext
from swpipe.core.task import PipelineTask
from swpipe.device import resolve
from swpipe.tasks.clicks._torchrec import in_backward_optimizer_filter
from swpipe.tasks.clicks.metrics import RankingJob
from swpipe.tasks.clicks.model import make_optimizer
from swpipe.tasks.clicks.sharded import shard_tables
from swpipe.tasks.torchrec._torchrec import EmbeddingCollectionSharder
from swpipe.tasks.torchrec.hstu.hstu_tasks import HSTUTasks
from swpipe.tasks.torchrec.hstu.ranking_model import HSTURanking, RankingConfig
from swpipe.tasks.torchrec.hstu.ratings import USERS, generate_ratings, read_ratings
from swpipe.tasks.torchrec.hstu.sequence_batch import Event, SequenceBatch
from swpipe.tasks.torchrec.step import TrainStep

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HSTUConfig:
    """One job. Two jobs of the same configuration give the same results, bit for bit.

    Attributes:
        ratings: Files of ratings; none: generated ones.
        sequences: Histories in a batch of one rank.
        device: Where the model lives, in torch's words.
        seed: Of the model's first parameters, and of generated ratings.
        model: The model's sizes.
    """

    ratings: Sequence[str | Path] = ()
    sequences: int = 32
    device: str = "cpu"
    seed: int = 0
    model: RankingConfig = field(default_factory=RankingConfig)


class Read(NamedTuple):
    """What a step has read.

    Attributes:
        epoch: How many times all histories were read completely before.
        rows: Histories, without those that fill a batch.
    """

    epoch: int
    rows: int


class HSTUJob(RankingJob):
    """A ranking model in training, on one rank or on all of the process group.

    Args:
        config: What to train on what; every rank reads the files.

    Attributes:
        config: As given.
        model: What is trained.
        optimizer: Of all parameters that backward does not update.
        step_tasks: The fourteen tasks.

    Raises:
        RatingsError: A file cannot be used.
    """

    def __init__(self, config: HSTUConfig) -> None:
        self.config = config
        alone = not dist.is_initialized()
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self._histories = _histories(config)
        super().__init__(config.device)
        whole = HSTURanking(config.model, config.seed)
        rate = config.model.learning_rate
        if alone:
            self.model: torch.nn.Module = whole.to(self.device)
        else:
            sharder = EmbeddingCollectionSharder()
            self.model = shard_tables(whole, "tables", sharder, self.device, rate)
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = make_optimizer(list(dense.values()), rate)
        self.step_tasks = HSTUTasks(
            self.model,
            TrainStep([self.optimizer]),
            prefetch=True,
            returns="tokens",
            group=None,
            device=self.device,
            forward="own" if alone else "prefetch",
            find="direct",
        )
        self.modules = (self.model,)
        self._pins_memory = resolve(self.device).pins_memory

    def update_auc(self, ctx: IterContext) -> None:
        """Count the predictions into the running AUC."""
        _, _, (logits, labels) = ctx.output
        self.auc.update(logits[:, 0], labels[:, 0])

    def tasks(self) -> tuple[PipelineTask, ...]:
        """The fourteen, and the running AUC, in serial order."""
        return (
            *self.step_tasks.tasks(),
            PipelineTask("auc", self.update_auc, io=[self._histogram()]),
        )

    # -------------------------------------------------------------------- data

    @property
    def epoch_steps(self) -> int:
        """How many steps once through the data takes."""
        return math.ceil(len(self._histories) / (self.config.sequences * self.size))

    def batches(self, steps: int | None = None, /) -> Iterator[SequenceBatch]:
        """This rank's batches: one epoch, or ``steps`` of them, over as many epochs as it takes."""
        size = self.config.sequences
        for step in range(self.epoch_steps if steps is None else steps):
            own = self._own(step)
            batch = SequenceBatch.of([*own, *[()] * (size - len(own))])
            yield batch.pin_memory() if self._pins_memory else batch

    def spec(self, ctx: Any) -> Read:
        """What a trained batch has read."""
        return Read(ctx.iter_idx // self.epoch_steps, len(self._own(ctx.iter_idx)))

    def _own(self, step: int) -> Sequence[Sequence[Event]]:
        size = self.config.sequences
        first = (step % self.epoch_steps * self.size + self.rank) * size
        return self._histories[first : first + size]

    # ------------------------------------------------------------------- ranks

    def over_ranks(self, value: T, /) -> list[T]:
        """The values of all ranks. A collective, with no iteration in flight."""
        return gather(value) if dist.is_initialized() else [value]

    def close(self) -> None:
        """Restore the model."""
        self.step_tasks.rewrite.detach()


def _histories(config: HSTUConfig) -> list[list[Event]]:
    sizes = config.model
    if config.ratings:
        return read_ratings(config.ratings, sizes.items, sizes.longest)
    return generate_ratings(USERS, sizes.items, sizes.longest, config.seed)
