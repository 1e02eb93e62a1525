"""The memory that tasks are seen to hold, from which task to which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swpipe import IterContext, PipelineTask
from swpipe.profiler import Block, TaskMemory, measure_memory

KIB = 2**10


def empty(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def measured(*fns: Any, batch: Any = None) -> TaskMemory:
    """Return the memory of tasks that are named after their functions."""
    return measure_memory([PipelineTask(fn.__name__, fn) for fn in fns], [batch], device="cpu")


def test_a_storage_counts_once_until_its_last_holder_is_gone() -> None:
    """Views, aliases and arrays in its memory are the same memory."""

    def read(ctx: IterContext) -> None:
        ctx.x = empty(8)
        ctx.view, ctx.array = ctx.x[:16], ctx.x.numpy()

    def wrap(ctx: IterContext) -> None:
        ctx.numbers = np.zeros(KIB, dtype=np.uint8)
        ctx.wrapped = torch.from_numpy(ctx.numbers)

    def drop(ctx: IterContext) -> None:
        del ctx.x, ctx.array

    def use(ctx: IterContext) -> None:
        ctx.y = ctx.view.clone()
        del ctx.view

    found = measured(read, drop, use)
    assert found.blocks == (
        Block("read", "use", 8 * KIB, "x", removed=True),
        Block("use", "", 16, "y"),
    )
    assert found.working == {}
    assert [block.bytes for block in measured(wrap).blocks] == [KIB]


def test_what_a_task_needs_while_it_runs_is_told_apart() -> None:
    """It is separate from its results; a task that frees before it allocates needs less."""

    def make(ctx: IterContext) -> None:
        ctx.x = (empty(40) + empty(40)) + empty(40)  # three are there at once

    def replace(ctx: IterContext) -> None:
        del ctx.x
        ctx.y = empty(40)

    def shrink(ctx: IterContext) -> None:
        del ctx.y  # 40 before it makes anything: no less is needed
        ctx.z = empty(10)

    found = measured(make, replace, shrink)
    assert found.working == {"make": 80 * KIB, "replace": -40 * KIB, "shrink": -10 * KIB}
    assert found.serial_peak(["make", "replace", "shrink"]) == 120 * KIB


def test_the_batch_and_arrays_count() -> None:
    """Its tensors are copies; arrays are found where the context reaches them."""

    def read(ctx: IterContext) -> None:
        ctx.raw, ctx.array = np.zeros(100, dtype=np.uint8), np.zeros(50)[10:]

    def drop(ctx: IterContext) -> None:
        del ctx.raw, ctx.batch

    found = measured(read, drop, batch=[empty(2), np.zeros(7, dtype=np.uint8)])
    assert set(found.blocks) == {
        Block("<pull>", "drop", 2 * KIB + 7, "batch", removed=True),
        Block("read", "drop", 100, "raw", removed=True),
        Block("read", "", 400, "array"),
    }


class Movable:
    """An object with a ``to`` of its own."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Movable:
        """Return the object on the device."""
        return Movable(self.x.to(device))


def test_objects_with_to_hold_their_tensors() -> None:
    """A batch that was copied to the device is an example."""

    def copy(ctx: IterContext) -> None:
        ctx.there = Movable(empty(2))

    def drop(ctx: IterContext) -> None:
        del ctx.there

    assert measured(copy, drop).blocks == (Block("copy", "drop", 2 * KIB, "there", removed=True),)


class Training:
    """A training step of a linear layer with momentum."""

    def __init__(self) -> None:
        self.model = nn.Linear(256, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def forward(self, ctx: IterContext) -> None:
        ctx.loss = self.model(ctx.batch).square().mean()

    def backward(self, ctx: IterContext) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        ctx.loss.backward()

    def step(self, ctx: IterContext) -> None:
        self.optimizer.step()


def test_gradients_are_held_until_the_next_iteration_sets_them_to_none() -> None:
    """Parameters and the optimizer's state are not counted: they outlive that, too."""
    work = Training()
    found = measured(work.forward, work.backward, work.step, batch=torch.ones(8, 256))
    assert Block("backward", "backward", 1 * KIB, later=1) in found.blocks
    assert {block.end for block in found.blocks if block.begin == "forward"} == {"backward", ""}
    assert not any(block.begin == "step" for block in found.blocks)


def test_of_several_batches_the_one_that_holds_most_counts() -> None:
    """No batch is an error."""

    def read(ctx: IterContext) -> None:
        ctx.x = empty(ctx.batch)

    tasks = [PipelineTask("read", read)]
    assert measure_memory(tasks, [1, 3, 2], device="cpu").blocks == (
        Block("read", "", 3 * KIB, "x"),
    )
    with pytest.raises(ValueError, match="give at least one batch"):
        measure_memory(tasks, [], device="cpu")
