"""Shapes of host work, device work and copies, with the lower bound on a loop over each.

Every step adds up its batch, so that the results of all loops over a shape can be compared bit for
bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.interval import block
from tests import backend
from tests.support.device_work import SIMULATED, device, spin

_SCALE = 2.0 if SIMULATED else 1.0
"""The factor of all times; the simulated device's are less exact, as its threads share two cores.
"""

_MIB = 2**18
"""Elements of four bytes in a MiB."""

LINK_US_PER_MIB = 20_000
"""The speed of the simulated device's link, for the shapes that are bound by their copies."""


def host(ms: float) -> None:
    """Occupy the host for ``ms``: by sleeping if the simulated device's threads need the cores."""
    if SIMULATED:
        block(ms / 1e3)
        return
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        pass


@dataclass(frozen=True, slots=True)
class Shape:
    """The work of a step.

    Attributes:
        what: In words.
        parts: (host ms, device ms), one after the other: the work that trains.
        batches: Four batches on the host, which repeat.
        launches: Small kernels to launch besides.
        exchange_ms: Device work on the batch that may run ahead, on a stream of its own.
        syncs: The step ends with ``.item()``.
        pageable: The batches lie in memory that is not pinned.
        gains: There is a copy or an exchange to hide.
        link_us: The time of a copy on the simulated device, per MiB.
        launch_us: The host's time for a launch there, in addition to torch's.
    """

    what: str
    parts: tuple[tuple[float, float], ...]
    batches: Sequence[Tensor]
    launches: int = 0
    exchange_ms: float = 0.0
    syncs: bool = False
    pageable: bool = False
    gains: bool = False
    link_us: int = 0
    launch_us: int = 10

    def exchange(self, batch: Tensor) -> Tensor:
        """Run the exchange, which may run ahead of the step."""
        if self.exchange_ms:
            spin(_SCALE * self.exchange_ms)
        return batch + 1 if self.exchange_ms else batch

    def train(self, batch: Tensor, total: Tensor) -> None:
        """Run the part of the step that trains."""
        for host_ms, device_ms in self.parts:
            host(_SCALE * host_ms)
            spin(_SCALE * device_ms)
        for _ in range(self.launches):
            total.add_(0)
        total.add_(batch[:1024].sum())
        if self.syncs:
            total.item()

    @property
    def host_ms(self) -> float:
        """The host time of the parts."""
        return _SCALE * sum(part[0] for part in self.parts)

    @property
    def device_ms(self) -> float:
        """The device time of the parts."""
        return _SCALE * sum(part[1] for part in self.parts)

    def bound_ms(self, copy_ms: float, launch_ms: float) -> float:
        """Return the lower bound on a loop's step, given the time of a copy and of the launches."""
        host_ms = self.host_ms + launch_ms
        step_ms = host_ms + self.device_ms if self.syncs else max(host_ms, self.device_ms)
        return max(step_ms, copy_ms, _SCALE * self.exchange_ms)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Give the simulated device this shape's costs within the block; CUDA keeps its own."""
        with ExitStack() as costs:
            if SIMULATED:
                costs.enter_context(backend.misbehaving(link_us_per_mib=self.link_us))
                costs.enter_context(backend.charging(launch_us=self.launch_us))
            yield


def _batches(elements: int, *, pin: bool) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    few = [torch.empty(elements).uniform_(generator=draws) for _ in range(4)]
    return [one.pin_memory() if pin else one for one in few]


def shapes() -> list[Shape]:
    """Return the eight shapes; which of host and device takes longer varies within some steps."""
    small = _batches(1024, pin=True)
    pinned = _batches(_MIB if SIMULATED else 256 * _MIB, pin=True)
    pageable = _batches(_MIB if SIMULATED else 64 * _MIB, pin=False)
    link: dict[str, Any] = {"link_us": LINK_US_PER_MIB, "gains": True}
    return [
        Shape(
            "host-bound: small kernels",
            (),
            small,
            launches=300 if SIMULATED else 2_000,
            launch_us=50,
        ),
        Shape("device-bound", ((3, 10),), small),
        Shape("balanced", ((1, 1),) * 10, small),
        Shape("small kernels, then a long one", ((0.7, 0.5),) * 10 + ((0.1, 5),), small),
        Shape("copy-bound, pinned", ((1, 2),), pinned, **link),
        Shape("copy-bound, pageable", ((1, 2),), pageable, pageable=True, **link),
        Shape("a sync in each step", ((1, 6),), pageable, syncs=True, pageable=True, **link),
        Shape("two streams", ((1, 8),), small, exchange_ms=6, gains=True),
    ]


def ms_each(work: Callable[[], object], count: int = 8) -> float:
    """Return the mean time of ``work`` in ms, over calls that begin and end with an idle device."""
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        work()
    torch.accelerator.synchronize()
    return (time.perf_counter() - begin) / count * 1e3


def copy_ms(shape: Shape) -> float:
    """Return the time of a copy in ms: the slower of pinning the batch and of the transfer."""
    batch = shape.batches[0].pin_memory() if shape.pageable else shape.batches[0]
    took = ms_each(lambda: batch.to(device(), non_blocking=True))
    return max(took, ms_each(lambda: batch.copy_(shape.batches[0])) if shape.pageable else 0.0)


def launch_ms(shape: Shape) -> float:
    """Return the time of the small kernels, in ms."""
    total = torch.zeros(1, device=device())
    return ms_each(lambda: [total.add_(0) for _ in range(shape.launches)], 3)
