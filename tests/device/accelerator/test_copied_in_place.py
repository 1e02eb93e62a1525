"""``enable_inplace_copy_batch``: batches are copied ahead, into memory of the caller's stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchrec")

from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec import (
    MemoryOptions,
    SparseDistPipeline,
    SparseDistTasks,
    TaskOptions,
    TrainPipelineBase,
    TrainStep,
)
from tests import backend
from tests.device.accelerator.work import DEVICE, SIMULATED

STEPS, ROWS = 12, 256


@dataclass
class PlainBatch:
    """A batch whose ``to`` has no ``data_copy_stream``."""

    x: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        return PlainBatch(self.x.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.x.record_stream(stream)


@dataclass
class InPlaceBatch(PlainBatch):
    """A batch that is copied like TorchRec's own ones."""

    streams: ClassVar[list[tuple[torch.Stream, torch.Stream]]] = []

    def to(
        self,
        device: torch.device,
        non_blocking: bool = False,
        data_copy_stream: torch.Stream | None = None,
    ) -> Any:
        assert data_copy_stream is not None
        current = torch.accelerator.current_stream()
        self.streams.append((current, data_copy_stream))
        x = torch.empty_like(self.x, device=device)
        with data_copy_stream:
            data_copy_stream.wait_stream(current)
            x.copy_(self.x, non_blocking=non_blocking)
        return InPlaceBatch(x)


class Model(nn.Module):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(8, 4)

    def forward(self, batch: PlainBatch) -> tuple[Tensor, Tensor]:
        output = self.layer(batch.x)
        return output.square().mean(), output.detach()


def batches(kind: type[PlainBatch]) -> Iterator[Any]:
    """Yield different batches."""
    draws = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        x = torch.rand(ROWS, 8, generator=draws)
        yield kind(x.pin_memory() if torch.cuda.is_available() else x)


def trained(kind: type[PlainBatch], **given: Any) -> list[Tensor]:
    """Train, and return outputs and parameters on the host."""
    model = Model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline: Any = TrainPipelineBase(model, optimizer, DEVICE, **given)
    data = batches(kind)
    outputs = [pipeline.progress(data) for _ in range(STEPS)]
    left = [tensor.detach().cpu() for tensor in (*outputs, *model.parameters())]
    pipeline.close()
    return left


def in_place() -> dict[str, Any]:
    """Return the option under the name that the installed TorchRec has for it."""
    names = TrainPipelineBase.__signature__.parameters
    known = {"enable_inplace_copy_batch", "inplace_copy_batch_to_gpu"} & set(names)
    return dict.fromkeys(known, True)


def test_batches_get_memory_of_the_callers_stream() -> None:
    """They are copied on another stream, and training gives the same bits."""
    wanted = trained(PlainBatch)
    InPlaceBatch.streams.clear()
    odd = backend.misbehaving(late_streams=200.0, poison=True) if SIMULATED else nullcontext()
    with odd:
        found = trained(InPlaceBatch, **in_place())
    assert all(map(torch.equal, found, wanted))
    here = torch.accelerator.current_stream()
    assert len(InPlaceBatch.streams) == STEPS
    assert all(current == here != copying for current, copying in InPlaceBatch.streams)


def test_a_batch_that_cannot_be_copied_so_is_told() -> None:
    """The error says what its ``to`` has to do."""
    with pytest.raises(TypeError, match=r"PlainBatch\.to takes no data_copy_stream: let it take"):
        trained(PlainBatch, **in_place())


def test_under_a_plan_with_one_stream_it_is_the_callers() -> None:
    """Nothing is copied ahead there, and nothing waits."""
    model = Model().to(DEVICE)
    step = TrainStep([torch.optim.SGD(model.parameters(), lr=0.1)])
    memory = MemoryOptions(enable_inplace_copy_batch=True)
    tasks = SparseDistTasks(model, step, TaskOptions(forward="own", memory=memory), device=DEVICE)
    with SparseDistPipeline(tasks, plans.serial()) as pipeline:
        data = batches(InPlaceBatch)
        outputs = [pipeline.progress(data).cpu() for _ in range(STEPS)]
    assert all(map(torch.equal, outputs, trained(PlainBatch)[:STEPS]))
