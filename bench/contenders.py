"""The pipelines that are timed on the two-rank DLRM: TorchRec's and swpipe's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from bench.dlrm import CPU, Batch
from swpipe.tasks import torchrec as ours
from swpipe.tasks.torchrec import PipelineFactory

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
    from torchrec.distributed.train_pipeline.train_pipelines import (
        StagedTrainPipeline,
        TrainPipelineFusedSparseDist,
        TrainPipelineSemiSync,
    )


class HostStream:
    """The stand-in for a stream in TorchRec's staged pipeline on a CPU."""

    device = CPU

    def wait_stream(self, stream: HostStream) -> None:
        """Do nothing: a CPU has finished all work already."""


_HERE = HostStream()


class Staged:
    """TorchRec's ``StagedTrainPipeline``, set up as in its documentation, with the loop around it.

    The stages are the copy and the exchange of ids; the rest of the step is in the loop.
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
        # Its forward would record its inputs on a stream; with None TorchRec means that there is
        # none, but the constructor asks it for its device.
        sparse.data_dist_stream = None

    def progress(self, data: Iterator[Batch]) -> Any:
        """Train one batch.

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


@contextmanager
def streams_on_a_cpu() -> Iterator[None]:
    """Provide the stream functions that two of TorchRec's pipelines call on a CPU, too."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", _nothing))
        stack.enter_context(mock.patch.object(torch, "get_device_module", _cpu_module))
        stack.enter_context(mock.patch.object(torch.cpu, "current_stream", _host_stream))
        yield


def _nothing(*_: object) -> None:
    """Do nothing: a CPU needs no ``record_stream``."""


def _cpu_module(*_: object) -> Any:
    return torch.cpu


def _host_stream(*_: object) -> HostStream:
    return _HERE


@dataclass(frozen=True)
class Contender:
    """A way to train the model.

    Attributes:
        name: In the table.
        make: A pipeline with ``progress``, from the model and its dense optimizer.
        ours: A plan of swpipe, not a pipeline of TorchRec.
        stale: Reads older rows, so that its numbers are not those of TorchRec's base pipeline.
    """

    name: str
    make: Callable[[nn.Module, torch.optim.Optimizer], Any]
    ours: bool = False
    stale: bool = False


def _torchrec(cls: Any, **options: Any) -> Callable[[nn.Module, torch.optim.Optimizer], Any]:
    return partial(cls, device=CPU, **options)


def _ours(name: str, **options: Any) -> Callable[[nn.Module, torch.optim.Optimizer], Any]:
    return lambda model, optimizer: PipelineFactory.create(
        name, model=model, optimizer=optimizer, device=CPU, **options
    )


CONTENDERS = (
    Contender("TorchRec base", _torchrec(TrainPipelineBase)),
    Contender("TorchRec sparse-dist", _torchrec(TrainPipelineSparseDist)),
    Contender("TorchRec staged", Staged),
    Contender("TorchRec fused", _torchrec(TrainPipelineFusedSparseDist)),
    Contender("TorchRec semi-sync", _torchrec(TrainPipelineSemiSync, start_batch=0), stale=True),
    Contender("serial", _ours("jagged_sw_serial"), ours=True),
    Contender("sparse_dist", _ours("jagged_sparse_dist"), ours=True),
    Contender("prefetch", _ours("jagged_prefetch_sparse_dist"), ours=True),
    Contender("split", _ours("jagged_split_sparse_dist"), ours=True),
    Contender("semi_sync", _ours("jagged_semi_sync_sparse_dist"), ours=True, stale=True),
    Contender(
        "pipeline_forward", _torchrec(ours.TrainPipelineBase, pipeline_forward=True), ours=True
    ),
    # Without the cut between the dense part and the tables, whose second backward costs the host.
    Contender("sparse_dist, uncut", _torchrec(ours.TrainPipelineSparseDist), ours=True),
    Contender(
        "split, uncut",
        _ours("jagged_split_sparse_dist", forward="ahead"),
        ours=True,
    ),
)
