"""2D sharding: the replicas of tables are averaged when TorchRec averages them.

Nobody called ``DMPCollection.sync()``, so replicas drifted apart. The class itself asks for a GPU.
The stand-in below has its type, on two ranks of which each takes the other's table sums into its
own, so that a sync too many, too few, or at another moment changes bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swpipe.tasks.torchrec import PipelineFactory, TrainStep
from swpipe.tasks.torchrec._torchrec import DMPCollection
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import CPU, Job, batches, dense_optimizer, everything, sharded
from tests.tasks.torchrec.trial import EXACT, Outcome, to_the_end

from torchrec.distributed.train_pipeline import TrainPipelineSparseDist  # isort: skip

JOBS = (Job(), Job(optimizer=torch.optim.Adam, options={"lr": 0.01}, fused=False))


class Replicas(DMPCollection):  # type: ignore[misc]
    """Stands in for a ``DMPCollection`` whose tables have replicas on other ranks."""

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Move the tables a little towards something that depends on both ranks' tables."""
        with torch.no_grad():
            for parameter in self.module.tables.parameters():
                local = parameter.detach()
                total = local.sum().reshape(1) if local.numel() else torch.zeros(1)
                dist.all_reduce(total)
                local.add_(1e-3 * total)


def _model(job: Job) -> nn.Module:
    model = sharded(job)
    model.__class__ = Replicas
    return model


def _differences(job: Job, interval: int | None) -> dict[str, list[str]]:
    model = _model(job)
    theirs: Any = TrainPipelineSparseDist(
        model,
        dense_optimizer(job, model),
        CPU,
        execute_all_batches=True,
        dmp_collection_sync_interval_batches=interval,
    )
    wanted = Outcome(to_the_end(theirs, batches(8)), everything(model))
    found = {}
    for name in EXACT:
        model = _model(job)
        step = TrainStep([dense_optimizer(job, model)], sync_interval=interval)
        with PipelineFactory.create(name, model=model, step=step, device=CPU) as pipeline:
            outcome = Outcome(to_the_end(pipeline, batches(8)), everything(model))
        if where := outcome.differences(wanted):
            found[name] = where
    return found


@pytest.mark.parametrize("interval", [1, 3, None])
@pytest.mark.parametrize("job", JOBS, ids=["fused", "stepped"])
def test_replicas_are_averaged_as_by_torchrec(
    two_ranks: Ranks, job: Job, interval: int | None
) -> None:
    """After the update within the backward, of every n-th batch, bit for bit."""
    assert two_ranks.run(_differences, job, interval) == [{}, {}]


@pytest.mark.parametrize("interval", [0, True, 1.5])
def test_an_interval_that_is_none_is_refused(interval: Any) -> None:
    """Batches are counted."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(ValueError, match="sync_interval is"):
        TrainStep([optimizer], sync_interval=interval)
