"""Device work of known length and with known results.

Only this module and ``tests.support.device_work`` know which accelerator is in use: CUDA, or the
test backend, "sim".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from swpipe import IterContext, PipelinePlan, SWPipeline
from tests import backend
from tests.support import device_work

DEVICE, SIMULATED, spin = device_work.device(), device_work.SIMULATED, device_work.spin
ELEMENTS = 2**10 if SIMULATED else 8 * 2**20
"""The size of a tensor to which the caching allocator always gives its own block."""

needs_gpu_clock = pytest.mark.skipif(SIMULATED, reason="the test backend's clock is the host's")
"""Marks tests whose verdict depends on times."""


Time: TypeAlias = tuple[float, float]
"""A start and an end, in any unit."""


def own_stream() -> torch.Stream:
    """Return a new stream; on CUDA, one of CUDA's own class, which has another hash."""
    return torch.Stream(device=DEVICE) if SIMULATED else torch.cuda.Stream()


def current_priority() -> int:
    """Return the priority of the current stream: 0, or negative for a higher priority."""
    if SIMULATED:
        return backend.priority(torch.accelerator.current_stream())
    return torch.cuda.current_stream().priority


def filled(value: float) -> Tensor:
    """Return a tensor filled with ``value``, made on the current stream."""
    return torch.full((ELEMENTS,), float(value), device=DEVICE)


def extremes(tensor: Tensor) -> Tensor:
    """Return the smallest and the largest element, read on the current stream."""
    return torch.stack([tensor.amin(), tensor.amax()])


def wrong(seen: dict[int, Tensor]) -> list[int]:
    """Return the iterations i whose extremes are not i + 1, after a synchronize."""
    torch.accelerator.synchronize()
    return [i for i, pair in sorted(seen.items()) if pair.tolist() != [i + 1.0, i + 1.0]]


def warm_up() -> None:
    """Run each kernel once, which loads it, and long enough for the device's clock to rise."""
    spin(100.0)
    extremes(filled(0.0)).tolist()
    torch.accelerator.synchronize()


def run(
    plan: PipelinePlan, batches: Iterable[Any], then: Callable[[IterContext], None] | None = None
) -> None:
    """Run a plan to its end, and call a function on each context that is returned."""
    warm_up()
    with SWPipeline(plan, device=DEVICE) as pipe:
        for ctx in pipe.iterate(batches):
            if then is not None:
                then(ctx)
            del ctx


class Mark:
    """Two events around some work on the current stream."""

    def __init__(self) -> None:
        self._events = [torch.Event(device=DEVICE, enable_timing=True) for _ in range(2)]

    def __enter__(self) -> None:
        self._events[0].record()

    def __exit__(self, *failure: object) -> None:
        self._events[1].record()

    def span_ms(self, origin: torch.Event) -> Time:
        """Return start and end in ms after ``origin``; the device must have reached both."""
        return origin.elapsed_time(self._events[0]), origin.elapsed_time(self._events[1])


def covered(span: Time, others: Iterable[Time]) -> float:
    """Return the fraction of ``span`` that is covered by ``others``, which do not overlap."""
    common = sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)
    return common / (span[1] - span[0])
