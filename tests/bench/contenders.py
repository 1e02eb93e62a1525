"""The pipelines that are timed on the two-rank DLRM: TorchRec's and swpipe's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swpipe.tasks.sparse_dist import PipelineFactory
from tests.bench.dlrm import CPU, Batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.distributed.train_pipeline import (
        TrainPipelineBase,
        TrainPipelineSparseDist,
    )
    from torchrec.distributed.train_pipeline.pipeline_stage import (
        PipelineStage,
        SparseDataDistUtil,
    )
    from torchrec.distributed.train_pipeline.train_pipelines import StagedTrainPipeline


class HostStream:
    """Takes the place of a stream in TorchRec's staged pipeline on a CPU."""

    device = CPU


class Staged:
    """TorchRec's ``StagedTrainPipeline`` as its documentation sets it up, and the loop around it.

    Stages: copy, then the exchange of ids; the step is the loop's own.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        here: Any = HostStream()
        sparse: Any = SparseDataDistUtil(model=model, data_dist_stream=here)
        self._pipeline: Any = StagedTrainPipeline(
            pipeline_stages=[
                PipelineStage("data_copy", lambda batch: batch.to(CPU, non_blocking=True), here),
                sparse.start_sparse_data_dist_stage(),
            ],
            compute_stream=here,
        )
        # Its forward would record what it uses on a stream; None is how TorchRec says that there is
        # none, but the constructor asks it for its device.
        sparse.data_dist_stream = None

    def progress(self, data: Iterator[Batch]) -> Any:
        """One step.

        Raises:
            StopIteration: All batches are through.
        """
        batch = self._pipeline.progress(data)
        if batch is None:
            raise StopIteration
        self._optimizer.zero_grad()
        losses, output = self._model(batch)
        torch.sum(losses, dim=0).backward()
        self._optimizer.step()
        return output


@dataclass(frozen=True)
class Contender:
    """A way to train the model.

    Attributes:
        name: In the table.
        make: A pipeline with ``progress``, from the model and its dense optimizer.
        kind: "torchrec", "exact" for ours that give the same numbers, "stale" for ours that do not.
    """

    name: str
    make: Callable[[nn.Module, torch.optim.Optimizer], Any]
    kind: str


def _torchrec(cls: Any) -> Callable[[nn.Module, torch.optim.Optimizer], Any]:
    return lambda model, optimizer: cls(model, optimizer, CPU)


def _ours(name: str) -> Callable[[nn.Module, torch.optim.Optimizer], Any]:
    return lambda model, optimizer: PipelineFactory.create(
        name, model=model, optimizer=optimizer, device=CPU
    )


CONTENDERS = (
    Contender("TorchRec base", _torchrec(TrainPipelineBase), "torchrec"),
    Contender("TorchRec sparse-dist", _torchrec(TrainPipelineSparseDist), "torchrec"),
    Contender("TorchRec staged", Staged, "torchrec"),
    Contender("serial", _ours("jagged_sw_serial"), "exact"),
    Contender("sparse_dist", _ours("jagged_sparse_dist"), "exact"),
    Contender("prefetch", _ours("jagged_prefetch_sparse_dist"), "exact"),
    Contender("split", _ours("jagged_split_sparse_dist"), "exact"),
    Contender("semi_sync", _ours("jagged_semi_sync_sparse_dist"), "stale"),
)
