"""The number of batches that a plan holds on an accelerator, compared with its order's need."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.memory import bytes_in_flight
from swpipe.core.resolved import resolve_plan
from swpipe.core.task_memory import KEPT, Block, TaskMemory

DEPTH = 4

ARRANGEMENTS = tuple(
    product(((0, 0), (0, 1), (1, 2), (0, 3), (2, 3)), (None, "copy"), ("default", "io"))
)
"""The stages of the copy and of the forward, the copy's stream, and its thread group."""


class HeldBatches:
    """Three tasks: a copy makes ``ctx.x``, the forward reads it, and a step follows.

    Args:
        device: The device of the tensors.
        elements: The number of elements of ``ctx.x``, of four bytes each.
        keep_busy: Keeps the current stream busy for so many ms.
    """

    def __init__(self, device: Any, elements: int, keep_busy: Callable[[float], None]) -> None:
        self.device, self.elements, self.keep_busy = device, elements, keep_busy

    def _copy(self, ctx: IterContext) -> None:
        ctx.x = torch.full((self.elements,), 1.0, device=self.device)
        self.keep_busy(0.5)

    def _forward(self, ctx: IterContext) -> None:
        ctx.loss = ctx.x.sum()
        self.keep_busy(0.5)

    def plan(
        self, stages: tuple[int, int], stream: str | None, group: str, keep: Sequence[str] | None
    ) -> PipelinePlan:
        """Return a plan of depth 4."""
        copy, forward = stages
        return PipelinePlan(
            {
                PipelineTask("copy", self._copy, reads=["batch"]): TaskSchedule(
                    copy, stream, thread_group=group
                ),
                PipelineTask("forward", self._forward, reads=["x"]): TaskSchedule(forward),
                PipelineTask("step", lambda ctx: None, reads=[]): TaskSchedule(DEPTH - 1),
            },
            deps=[("forward", "copy"), ("step", "forward")],
            pipeline_depth=DEPTH,
            keep=keep,
        )

    def peak(self, plan: PipelinePlan, iterations: int = 24) -> float:
        """Return the peak of the allocated memory, in batches."""
        accelerator = torch.accelerator
        gc.collect()
        accelerator.synchronize()
        accelerator.empty_cache()
        accelerator.reset_peak_memory_stats()
        before = accelerator.memory_allocated()
        with SWPipeline(plan, device=self.device) as pipe:
            for ctx in pipe.iterate(range(iterations)):
                del ctx
        accelerator.synchronize()
        return (accelerator.max_memory_allocated() - before) / (4 * self.elements)


def bound(plan: PipelinePlan, *, streams: bool = False) -> int:
    """Return the largest number of iterations between the maker and the last reader of ``ctx.x``.

    It holds in every interleaving of the plan's threads; with ``streams``, for a device.
    """
    held = TaskMemory((Block("copy", KEPT, 1, "x", users=("forward",)),))
    return bytes_in_flight(HappensBefore.of(resolve_plan(plan), streams=streams), held).total_bytes
