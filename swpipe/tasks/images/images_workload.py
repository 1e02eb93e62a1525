"""A workload that trains a small image model on generated, compressed images.

Decoding takes about as long as training, as is common with images from a disk. A plan that decodes
ahead can therefore show the effect of overlap.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from swpipe.core.context import IterContext
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.plans.prefetch import prefetch_plan
from swpipe.tasks.workload import DEFAULT, Job, Workload

CLASSES = 8
SIDE = 112
BATCH = 32
EPOCH = 300
_SEED = 0
_DIFFERENT = 16
"""The number of different batches; an epoch repeats them."""

AHEAD = ("decode", "augment")
LAST = ("forward", "backward", "step")


class ImageJob(Job):
    """A job with the tasks decode, augment, forward, backward and step.

    Args:
        device: The device that trains; None for the CPU.

    Attributes:
        model: The model, a small convolutional network.
    """

    epoch_steps = EPOCH

    def __init__(self, device: str | None = None) -> None:
        # One thread per operator: the plan's threads use the other cores, and sums split over a
        # different number of threads round differently.
        torch.set_num_threads(1)
        self.device = device or "cpu"
        # The initial parameters depend on the seed only, and the caller's generator is restored.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            self.model = nn.Sequential(
                *(nn.Conv2d(3, 24, 8, stride=8), nn.ReLU()),
                *(nn.Conv2d(24, 32, 3, padding=1), nn.ReLU()),
                *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)),
            ).to(self.device)
        self.modules = [self.model]
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        # A generator of its own: the data does not depend on how many draws the model made.
        draws = torch.Generator().manual_seed(_SEED)
        self._batches = [compressed(draws) for _ in range(_DIFFERENT)]

    def tasks(self) -> tuple[PipelineTask, ...]:
        """Return the tasks in serial order; the first two can run ahead."""
        # Pure, because these two read only their batch and the configuration.
        ahead = (PipelineTask(name, getattr(self, name), pure=True) for name in AHEAD)
        return (*ahead, *(PipelineTask(name, getattr(self, name)) for name in LAST))

    def batches(self, steps: int | None = None, /) -> Iterator[Any]:
        """Return an iterator over batches: compressed images and their classes, (BATCH,)."""
        return islice(cycle(self._batches), EPOCH if steps is None else steps)

    def decode(self, ctx: IterContext) -> None:
        """Decode the images to floats from 0 to 1, (BATCH, 3, SIDE, SIDE)."""
        images, classes = ctx.batch
        # A bytearray, because ``frombuffer`` warns about memory that is read-only.
        rows = torch.frombuffer(bytearray(zlib.decompress(images)), dtype=torch.uint8)
        ctx.x = rows.view(BATCH, 3, SIDE, SIDE).to(self.device).float().div_(255)
        ctx.y = classes.to(self.device)

    def augment(self, ctx: IterContext) -> None:
        """Mirror about half of the images, chosen by the seed and the iteration's number."""
        # Not the default generator: the draws are the same whichever plan runs the task.
        draws = torch.Generator().manual_seed(_SEED + ctx.iter_idx)
        mirrored = (torch.rand(BATCH, 1, 1, 1, generator=draws) < 0.5).to(self.device)
        ctx.x = torch.where(mirrored, ctx.x.flip(3), ctx.x).sub_(0.5)

    def forward(self, ctx: IterContext) -> None:
        """Compute the loss."""
        ctx.loss = nn.functional.cross_entropy(self.model(ctx.x), ctx.y)

    def backward(self, ctx: IterContext) -> None:
        """Compute the gradients of the parameters."""
        self._optimizer.zero_grad()
        ctx.loss.backward()

    def step(self, ctx: IterContext) -> None:
        """Update the parameters from their gradients."""
        self._optimizer.step()


def compressed(draws: torch.Generator) -> tuple[bytes, Tensor]:
    """Return zlib-compressed images, (BATCH, 3, SIDE, SIDE), and their classes, (BATCH,).

    An image is a noisy grating whose frequency is determined by its class.
    """
    classes = torch.randint(CLASSES, (BATCH,), generator=draws)
    angle = torch.linspace(0, 2 * math.pi, SIDE)
    waves = torch.sin(angle * (classes + 1).view(-1, 1)).view(BATCH, 1, 1, SIDE)
    noise = torch.randint(-20, 20, (BATCH, 3, SIDE, SIDE), generator=draws)
    pixels = (waves * 100 + 128 + noise).clamp(0, 255).to(torch.uint8)
    return zlib.compress(pixels.numpy().tobytes(), 1), classes


IMAGES = Workload(
    name=DEFAULT,
    plans={
        "serial": lambda: PipelinePlan.serial([*AHEAD, *LAST]),
        "pipelined": lambda: prefetch_plan(AHEAD, LAST, carried=[("forward", "step")]),
    },
    usual_plan="pipelined",
    open_job=ImageJob,
)
"""The workload that the command line trains if the user names none."""
