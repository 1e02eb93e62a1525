"""Device work of known length and with known results.

The only module here that knows which accelerator it is: CUDA, or the test backend, "sim"; with
``tests.support.device_work``.
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
"""Of a tensor that the caching allocator gives a block of its own, again and again."""

needs_gpu_clock = pytest.mark.skipif(SIMULATED, reason="the test backend's clock is the host's")
"""Times are the verdict."""


Time: TypeAlias = tuple[float, float]
"""Start and end, in any unit."""


def own_stream() -> torch.Stream:
    """A new stream, on CUDA of CUDA's own class, which has another hash."""
    return torch.Stream(device=DEVICE) if SIMULATED else torch.cuda.Stream()


def current_priority() -> int:
    """The priority of the current stream: 0, or negative where it comes first."""
    if SIMULATED:
        return backend.priority(torch.accelerator.current_stream())
    return torch.cuda.current_stream().priority


def filled(value: float) -> Tensor:
    """A tensor that is ``value`` everywhere, made on the current stream."""
    return torch.full((ELEMENTS,), float(value), device=DEVICE)


def extremes(tensor: Tensor) -> Tensor:
    """Its least and its greatest element, read on the current stream."""
    return torch.stack([tensor.amin(), tensor.amax()])


def wrong(seen: dict[int, Tensor]) -> list[int]:
    """The iterations i whose extremes are not i + 1, once the device is done."""
    torch.accelerator.synchronize()
    return [i for i, pair in sorted(seen.items()) if pair.tolist() != [i + 1.0, i + 1.0]]


def warm_up() -> None:
    """Run each kernel once, since the first run loads it, and long enough for the clock to rise."""
    spin(100.0)
    extremes(filled(0.0)).tolist()
    torch.accelerator.synchronize()


def run(
    plan: PipelinePlan, batches: Iterable[Any], then: Callable[[IterContext], None] | None = None
) -> None:
    """Run a plan to its end, and do something with each context right when it is handed out."""
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
        """Start and end, in ms after ``origin``; the device must be done with both."""
        return origin.elapsed_time(self._events[0]), origin.elapsed_time(self._events[1])


def covered(span: Time, others: Iterable[Time]) -> float:
    """The part of ``span`` in which one of ``others`` was at work, which take turns; 0 to 1."""
    common = sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)
    return common / (span[1] - span[0])
