"""The training step of the click model as tasks, and the plans that run them.

    ctx.batch ── read ──> raw ── decode ──> frame, malformed ── hash ──> host ── copy ──> inputs
    inputs ── forward ──> logits, loss ── backward ──> (gradients) ── step ──> (parameters)

The values in parentheses are outside the context: the tasks declare them as states. A task deletes
what no later task reads, so that an iteration in flight holds its batch in one form only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from click_log import Lines, batches_of, decode, generate, read
from click_model import ClickModel, encode
from torch import Tensor

from swpipe import DeclaredIO, PipelinePlan, PipelineTask
from swpipe.plans import prefetch_plan

BUCKETS = 1024
ROWS = 100_000
FEED = ("read", "decode", "hash", "copy")
"""The tasks that bring a batch from the file to the device."""

TRAIN = ("forward", "backward", "step")
"""The tasks that train on the batch."""


class ClickJob:
    """A click model in training; two jobs of one seed have equal numbers, bit for bit.

    Attributes:
        model: The model.
        optimizer: Updates all of its parameters.
    """

    def __init__(self, seed: int = 0, device: str = "cpu", buckets: int = BUCKETS) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = ClickModel(buckets).to(device)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.03)
        self._device = torch.device(device)
        self._buckets = buckets

    def read(self, ctx: Any) -> None:
        """Read the bytes of the batch's lines."""
        ctx.raw = read(ctx.batch)

    def decode(self, ctx: Any) -> None:
        """Parse the lines; rows without a label are dropped and counted."""
        ctx.frame, ctx.malformed = decode(ctx.raw)
        del ctx.raw

    def hash(self, ctx: Any) -> None:
        """Make tensors on the host."""
        ctx.host = encode(ctx.frame, self._buckets)
        del ctx.frame

    def copy(self, ctx: Any) -> None:
        """Copy the tensors to the device."""
        ctx.inputs = ctx.host.to(self._device)
        del ctx.host

    def forward(self, ctx: Any) -> None:
        """Compute logits and loss."""
        ctx.logits = self.model(ctx.inputs)
        ctx.loss = self.model.loss(ctx.inputs, ctx.logits)

    def backward(self, ctx: Any) -> None:
        """Compute the gradients."""
        self.optimizer.zero_grad()
        ctx.loss.backward()

    def step(self, ctx: Any) -> None:
        """Update the parameters from their gradients."""
        self.optimizer.step()

    def tasks(self) -> list[PipelineTask]:
        """Return the tasks in serial order, with what they use outside the context."""
        # "r" lets the loop's body read the parameters, such as to save them.
        parameters = DeclaredIO(state="parameters", memory=self.model, others="r")
        reads = DeclaredIO(state="parameters", mode="r")
        # Replayed, backward puts the gradients back that it has computed before.
        gradients = DeclaredIO(self._gradients, self._set_gradients, "gradients", others="")
        updates = [parameters, DeclaredIO(state="gradients", mode="r")]
        effects: dict[str, list[DeclaredIO]] = {
            "forward": [reads],
            "backward": [reads, gradients],
            "step": [*updates, DeclaredIO(state="optimizer", others="")],
        }
        return [
            PipelineTask(name, getattr(self, name), effects.get(name, ()), pure=name in FEED)
            for name in (*FEED, *TRAIN)
        ]

    def _gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters()]

    def _set_gradients(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient


def serial() -> PipelinePlan:
    """Return the plan of a plain loop: one task after the other on the caller's thread."""
    return PipelinePlan.serial([*FEED, *TRAIN])


def pipelined() -> PipelinePlan:
    """Return the plan that reads, decodes, hashes and copies the next batches meanwhile.

    Polars and torch release the interpreter lock, so the feed's thread overlaps the caller's.
    A depth of 3 evens out batches that take longer to read.
    """
    return prefetch_plan(
        FEED,
        TRAIN,
        carried=[("forward", "step")],
        depth=3,
        pull_group=None,  # a batch is a place in a file: pulling it costs nothing
        streams={"copy": "memcpy"},
    )


PLANS: dict[str, Callable[[], PipelinePlan]] = {"serial": serial, "pipelined": pipelined}


def log_in(folder: Path, rows: int = ROWS) -> Path:
    """Return a generated log in a folder, which is made at the first call."""
    path = folder / f"clicks-{rows}.tsv"
    return path if path.exists() else generate(path, rows)


def loop() -> tuple[list[PipelineTask], list[Lines]]:
    """Return tasks and batches, for ``swpipe report click_job:loop`` and the other commands."""
    torch.set_num_threads(1)  # the feed uses the other core
    return ClickJob().tasks(), batches_of(log_in(Path("build/clicks").absolute()), 2048)
