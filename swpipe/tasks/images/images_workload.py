"""A small image model on generated, compressed images, as a workload of the command line.

Decoding takes about as long as training does, as with pictures from a disk, so that a plan that
decodes ahead shows what overlap can do.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from swpipe.core.context import IterContext
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.plans.prefetch import prefetch_plan
from swpipe.tasks.workload import SEED, Job, Workload, register

CLASSES = 8
SIDE = 112
BATCH = 32
EPOCH = 300
_DIFFERENT = 16  # batches that are generated; an epoch goes through them again and again

AHEAD = ("decode", "augment")
LAST = ("forward", "backward", "step")


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What is trained, and where."""

    seed: int = 0
    device: str = "cpu"


class ImageJob(Job):
    """Decode, augment, forward, backward, step.

    Attributes:
        model: A small convolutional network.
    """

    epoch_steps = EPOCH

    def __init__(self, config: ImageConfig) -> None:
        self._seed = config.seed
        self._device = config.device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.model = nn.Sequential(
                *(nn.Conv2d(3, 24, 8, stride=8), nn.ReLU()),
                *(nn.Conv2d(24, 32, 3, padding=1), nn.ReLU()),
                *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)),
            ).to(config.device)
        self.modules = [self.model]
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        draws = torch.Generator().manual_seed(config.seed)
        self._batches = [compressed(draws) for _ in range(_DIFFERENT)]

    def tasks(self) -> tuple[PipelineTask, ...]:
        """In serial order; the first two run ahead."""
        ahead = (PipelineTask(name, getattr(self, name), pure=True) for name in AHEAD)
        return (*ahead, *(PipelineTask(name, getattr(self, name)) for name in LAST))

    def batches(self, steps: int | None = None, /) -> Iterator[Any]:
        """Compressed images, and their classes."""
        return islice(cycle(self._batches), EPOCH if steps is None else steps)

    def decode(self, ctx: IterContext) -> None:
        """Bytes to floats from 0 to 1."""
        images, classes = ctx.batch
        rows = torch.frombuffer(bytearray(zlib.decompress(images)), dtype=torch.uint8)
        ctx.x = rows.view(BATCH, 3, SIDE, SIDE).to(self._device).float().div_(255)
        ctx.y = classes.to(self._device)

    def augment(self, ctx: IterContext) -> None:
        """Mirror half of the images; what is drawn follows from the iteration's number."""
        draws = torch.Generator().manual_seed(self._seed + ctx.iter_idx)
        mirrored = (torch.rand(BATCH, 1, 1, 1, generator=draws) < 0.5).to(self._device)
        ctx.x = torch.where(mirrored, ctx.x.flip(3), ctx.x).sub_(0.5)

    def forward(self, ctx: IterContext) -> None:
        """The loss."""
        ctx.loss = nn.functional.cross_entropy(self.model(ctx.x), ctx.y)

    def backward(self, ctx: IterContext) -> None:
        """Gradients."""
        self._optimizer.zero_grad()
        ctx.loss.backward()

    def step(self, ctx: IterContext) -> None:
        """New parameters."""
        self._optimizer.step()


def compressed(draws: torch.Generator) -> tuple[bytes, Tensor]:
    """A batch of noisy gratings, whose frequency is their class: (BATCH, 3, SIDE, SIDE), zlib."""
    classes = torch.randint(CLASSES, (BATCH,), generator=draws)
    angle = torch.linspace(0, 2 * math.pi, SIDE)
    waves = torch.sin(angle * (classes + 1).view(-1, 1)).view(BATCH, 1, 1, SIDE)
    noise = torch.randint(-20, 20, (BATCH, 3, SIDE, SIDE), generator=draws)
    pixels = (waves * 100 + 128 + noise).clamp(0, 255).to(torch.uint8)
    return zlib.compress(pixels.numpy().tobytes(), 1), classes


def configure(options: Mapping[str, Any]) -> ImageConfig:
    """The job's configuration."""
    # The plan uses the other cores; and a sum that is split among more threads rounds otherwise.
    torch.set_num_threads(1)
    return ImageConfig(seed=options["seed"], device=options["device"] or "cpu")


register(
    Workload(
        name="images",
        plans={
            "serial": lambda: PipelinePlan.serial([*AHEAD, *LAST]),
            "pipelined": lambda: prefetch_plan(AHEAD, LAST, carried=[("forward", "step")]),
        },
        usual_plan="pipelined",
        configure=configure,
        open_job=ImageJob,
        options=(SEED,),
    )
)
