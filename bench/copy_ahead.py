"""The image loop over a slow link to the device: the copy ahead beside the plain loop.

The device is the test backend. Its link is as slow as the step, so that a loop that copies in turn
takes twice as long as the busier of the two, which is the lower bound. The process sees the backend
for ever, so this section is among the last.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import swpipe
from bench.measure import Row, Spread, compared, interleaved
from swpipe import IterContext
from swpipe.tasks.images.images_workload import BATCH, CLASSES, SIDE, compressed
from tests import backend

WARM_UP = 20  # the first 16 iterations are watched
PATCH = 8
AT_LEAST = 1.6
"""Times as fast as the plain loop."""


class Loop:
    """A small model of images on the device, the same each time; its first layer is of patches.

    Attributes:
        losses: One for each step.
    """

    def __init__(self, device: str) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = (nn.Linear(3 * PATCH**2, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
            self.model = nn.Sequential(*layers, nn.Linear(96, CLASSES)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.losses: list[Tensor] = []

    def train(self, ctx: IterContext) -> None:
        """Normalize, forward, backward, step."""
        pixels, classes = ctx.batch
        x = pixels.float().div_(255).sub_(0.5)
        x = x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5)
        scores = self.model(x.reshape(BATCH, -1, 3 * PATCH**2)).mean(1)
        loss = nn.functional.cross_entropy(scores, classes)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def results(self) -> list[Tensor]:
        """Losses and parameters."""
        torch.accelerator.synchronize()
        return [one.detach().cpu() for one in (*self.losses, *self.model.parameters())]


def decoded(count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches as a loader's workers give them: pixels (32, 3, 112, 112), and classes."""
    draws = torch.Generator().manual_seed(0)
    found = []
    for _ in range(min(count, 16)):
        images, classes = compressed(draws)
        pixels = torch.frombuffer(bytearray(zlib.decompress(images)), dtype=torch.uint8)
        found.append((pixels.view(BATCH, 3, SIDE, SIDE), classes))
    return (found * math.ceil(count / len(found)))[:count]


Runner = Callable[[Loop, Sequence[Any], str], Iterable[Any]]


def run_plain(loop: Loop, batches: Sequence[Any], device: str) -> Iterable[Any]:
    """As most loops are written."""
    for number, batch in enumerate(batches):
        loop.train(IterContext([one.to(device) for one in batch], number))
        yield None


def run_pinned(loop: Loop, batches: Sequence[Any], device: str) -> Iterable[Any]:
    """With ``pin_memory`` and ``non_blocking``, on one stream."""
    for number, batch in enumerate(batches):
        moved = [one.pin_memory().to(device, non_blocking=True) for one in batch]
        loop.train(IterContext(moved, number))
        yield None


def run_ahead(loop: Loop, batches: Sequence[Any], device: str) -> Iterable[Any]:
    """With one argument."""
    with swpipe.overlap(batches, [loop.train], device=device) as ahead:
        yield from ahead


def ms_per_step(
    run: Runner, batches: Sequence[Any], device: str, results: list[list[Tensor]] | None = None
) -> float:
    """Time per step, from the end of the device's work on one to that on the last."""
    loop = Loop(device)
    begin = 0.0
    for number, _ in enumerate(run(loop, batches, device)):
        if number == WARM_UP:
            torch.accelerator.synchronize()
            begin = time.perf_counter()
    torch.accelerator.synchronize()
    seconds = time.perf_counter() - begin
    if results is not None:
        results.append(loop.results())
    return seconds / (len(batches) - WARM_UP - 1) * 1e3


def ms_per_copy(batches: Sequence[Any], device: str) -> float:
    """Time of a copy alone."""
    pinned = [one.pin_memory() for one in batches[0]]
    begin = time.perf_counter()
    for _ in range(10):
        for one in pinned:
            one.to(device, non_blocking=True)
    torch.accelerator.synchronize()
    return (time.perf_counter() - begin) / 10 * 1e3


def rows(rounds: int = 5, steps: int = 70) -> list[Row]:
    """Beside the plain loop with a bar, and beside pinned memory on one stream."""
    if not hasattr(torch, "sim"):
        if (reason := backend.why_not()) is not None:
            return [Row("image loop, copy ahead", f"skipped: {reason}")]
        backend.load()
    device = str(torch.accelerator.current_accelerator())
    batches = decoded(steps)
    there = [[one.to(device) for one in batch] for batch in batches]
    step_ms = min(ms_per_step(run_plain, there, device) for _ in range(3))
    mib = sum(one.nbytes for one in batches[0]) / 2**20
    results: list[list[Tensor]] = []
    with backend.misbehaving(link_us_per_mib=1e3 * step_ms / mib):
        plain, pinned, ahead, copies, alone = interleaved(
            rounds,
            *(
                partial(ms_per_step, run, batches, device, results)
                for run in (run_plain, run_pinned, run_ahead)
            ),
            partial(ms_per_copy, batches, device),
            partial(ms_per_step, run_plain, there, device),
        )
    for found in results:  # bit for bit
        torch.testing.assert_close(found, results[0], rtol=0, atol=0, equal_nan=True)
    bounds = [max(pair) for pair in zip(copies, alone, strict=True)]
    return [
        compared("image loop, copy ahead", ahead, plain, "ms", "plain loop", 1 / AT_LEAST),
        compared("image loop, copy ahead", ahead, pinned, "ms", "pinned, one stream"),
        compared("image loop, copy ahead", ahead, bounds, "ms", "lower bound"),
        Row("  of it", f"copy {Spread.of(copies).text()} ms", f"step {Spread.of(alone).text()} ms"),
    ]
