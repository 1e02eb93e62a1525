"""A stack of layers as tasks, with device work of known length, whose activations may be offloaded.

Each layer keeps 1 MiB for its backward: what it returns, which the next layer keeps, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.device.offload import Offload, offloaded, with_offload
from swpipe.profiler import measure_memory

WIDTH, ROWS = 1024, 256
FORWARD_MS, BACKWARD_MS = 2.0, 4.0


class _Activations:
    """A value passed between layers; tensors directly on the context would stay on the device."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.edges: list[GradientEdge] = []


class Layers:
    """Layers on a device, and the tasks of their forward and backward.

    Args:
        count: The number of layers.
        device: The device on which they are.
        keep_busy: Keeps the current stream busy for so many ms.
    """

    def __init__(
        self, count: int, device: torch.device, keep_busy: Callable[[float], None]
    ) -> None:
        draws = torch.Generator().manual_seed(0)
        self.weights = [
            torch.nn.Parameter(torch.rand(WIDTH, generator=draws).to(device)) for _ in range(count)
        ]
        self.device, self._keep_busy = device, keep_busy
        self.batch = torch.rand(ROWS, WIDTH, generator=draws)

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.weights)

    def tasks(self) -> list[PipelineTask]:
        """Return the forward tasks of all layers, then the backward tasks, in serial order."""
        numbers = range(self.count)
        tasks = [PipelineTask(f"forward{n}", self._forward(n)) for n in numbers]
        return tasks + [PipelineTask(f"backward{n}", self._backward(n)) for n in reversed(numbers)]

    def pairs(self, which: Sequence[int]) -> list[Offload]:
        """Return a pair for each of these layers."""
        device = str(self.device)
        return [Offload(f"layer{n}", f"forward{n}", f"backward{n}", device) for n in which]

    def pipeline(self, which: Sequence[int], run_ahead: int | None = None) -> SWPipeline[Any]:
        """Return a pipeline that offloads these layers."""
        tasks, pairs = self.tasks(), self.pairs(which)
        plan = with_offload(PipelinePlan.serial(tasks), pairs)
        plan = replace(plan, run_ahead=run_ahead)
        return SWPipeline(plan, offloaded(tasks, pairs), device=str(self.device))

    def gradients(self, which: Sequence[int], steps: int = 1) -> list[Tensor]:
        """Return the gradients after some steps."""
        for weight in self.weights:
            weight.grad = None
        with self.pipeline(which) as pipe:
            pipe.run([self.batch] * steps)
        return [weight.grad.cpu() for weight in self.weights if weight.grad is not None]

    def _forward(self, n: int) -> Callable[[Any], None]:
        def forward(ctx: Any) -> None:
            if n == 0:
                ctx.activations = _Activations(ctx.batch.to(self.device, non_blocking=True))
            held: _Activations = ctx.activations
            self._keep_busy(FORWARD_MS)
            held.value = torch.relu(held.value * self.weights[n])
            held.edges.append(get_gradient_edge(held.value))

        return forward

    def _backward(self, n: int) -> Callable[[Any], None]:
        def backward(ctx: Any) -> None:
            held: _Activations = ctx.activations
            if n == self.count - 1:
                ctx.output, held.value = held.value.detach().sum(), torch.ones_like(held.value)
            self._keep_busy(BACKWARD_MS)
            sources: list[Any] = [self.weights[n], *held.edges[n - 1 : n]]
            outputs: Any = (held.edges.pop(),)
            gradient, *rest = torch.autograd.grad(outputs, sources, held.value)
            weight = self.weights[n]
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
            held.value = rest[0] if rest else gradient

        return backward


def kept_bytes(layers: Layers, which: Sequence[int]) -> int:
    """Return the peak of the memory that forwards keep on the device, as measured."""
    tasks = offloaded(layers.tasks(), layers.pairs(which))
    names = [task.name for task in tasks]
    memory = measure_memory(
        tasks, [layers.batch], device=layers.device, state=layers.weights, keep=[]
    )
    kinds = ("forward", "restore")
    blocks = [b for b in memory.blocks if b.begin.startswith(kinds) and b.end != b.begin]
    held = replace(memory, blocks=tuple(blocks)).held(names)
    # A forward frees what was copied before it makes its own: it then needs less than nothing.
    freed = [min(0, memory.working.get(name, 0)) for name in names]
    return max(map(sum, zip(held, [*freed, 0], strict=True)))
