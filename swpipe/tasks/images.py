"""A small image model on generated, compressed images: a loop for a first look, with torch alone.

Decoding takes about as long as training, as is common with images from a disk. A plan that decodes
ahead can therefore show the effect of overlap.
"""

from __future__ import annotations

import math
import zlib
from itertools import cycle, islice

import torch
from torch import Tensor, nn

from swpipe.core.context import IterContext
from swpipe.core.task import PipelineTask, task

CLASSES = 8
SIDE = 112
BATCH = 32
EPOCH = 300
_SEED = 0
_DIFFERENT = 16
"""The number of different batches; an epoch repeats them."""


def loop() -> tuple[list[PipelineTask], list[tuple[bytes, Tensor]]]:
    """Return the tasks in serial order, and the batches of an epoch: compressed images and classes.

    The model is a convolutional network on the CPU. The first two tasks may run ahead.
    """
    # One thread per operator: the plan's threads use the other cores, and sums split over a
    # different number of threads round differently.
    torch.set_num_threads(1)
    # The initial parameters depend on the seed only, and the caller's generator is restored.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = nn.Sequential(
            nn.Conv2d(3, 24, 8, stride=8),
            nn.ReLU(),
            nn.Conv2d(24, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, CLASSES),
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    @task(pure=True)
    def decode(ctx: IterContext) -> None:
        """Decode the images to floats from 0 to 1, (BATCH, 3, SIDE, SIDE)."""
        images, ctx.y = ctx.batch
        # A bytearray, because ``frombuffer`` warns about memory that is read-only.
        pixels = torch.frombuffer(bytearray(zlib.decompress(images)), dtype=torch.uint8)
        ctx.x = pixels.view(BATCH, 3, SIDE, SIDE).float().div_(255)

    @task(pure=True)
    def augment(ctx: IterContext) -> None:
        """Mirror about half of the images, chosen by the seed and the iteration's number."""
        # Not the default generator: the draws are the same whichever plan runs the task.
        draws = torch.Generator().manual_seed(_SEED + ctx.iter_idx)
        mirrored = torch.rand(BATCH, 1, 1, 1, generator=draws) < 0.5
        ctx.x = torch.where(mirrored, ctx.x.flip(3), ctx.x).sub_(0.5)

    @task
    def forward(ctx: IterContext) -> None:
        """Compute the loss."""
        ctx.loss = nn.functional.cross_entropy(model(ctx.x), ctx.y)

    @task
    def backward(ctx: IterContext) -> None:
        """Compute the gradients of the parameters."""
        optimizer.zero_grad()
        ctx.loss.backward()

    @task
    def step(ctx: IterContext) -> None:
        """Update the parameters from their gradients."""
        optimizer.step()

    # A generator of its own: the data does not depend on how many draws the model made.
    draws = torch.Generator().manual_seed(_SEED)
    different = [compressed(draws) for _ in range(_DIFFERENT)]
    return [decode, augment, forward, backward, step], list(islice(cycle(different), EPOCH))


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
