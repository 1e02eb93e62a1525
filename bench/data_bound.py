"""A loop over compressed files, whose feature extraction takes about as long as training."""

from __future__ import annotations

import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from swpipe import IterContext, PipelineTask
from swpipe.plans import prefetch_plan

AHEAD = 2
FEED, TRAIN = ("read", "inflate", "features"), ("forward", "backward", "step")
PLAN = prefetch_plan(FEED, TRAIN, carried=[("forward", "step")], depth=AHEAD + 1, pull_group=None)


def files(folder: Path, count: int = 4, rows: int = 4096) -> list[Path]:
    """Write compressed batches to disk, and return their paths."""
    rng = np.random.default_rng(0)
    paths = [folder / f"{number}.z" for number in range(count)]
    for path in paths:
        path.write_bytes(zlib.compress(rng.integers(0, 9, (rows, 64), dtype=np.int32).tobytes()))
    return paths


def loop_tasks() -> list[PipelineTask]:
    """Return the tasks: read, inflate, compute features, train a small network."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def read(ctx: IterContext) -> None:
        ctx.packed = ctx.batch.read_bytes()

    def inflate(ctx: IterContext) -> None:
        ctx.raw = zlib.decompress(ctx.packed)

    def features(ctx: IterContext) -> None:
        counts = np.frombuffer(ctx.raw, np.int32).reshape(-1, 64)
        logs = np.log1p(counts.astype(np.float32))
        ctx.x = torch.from_numpy(logs - logs.mean(0))

    def forward(ctx: IterContext) -> None:
        ctx.loss = model(ctx.x).square().mean()

    def backward(ctx: IterContext) -> None:
        optimizer.zero_grad()
        ctx.loss.backward()

    def step(ctx: IterContext) -> None:
        optimizer.step()

    named = (read, inflate, features, forward, backward, step)
    return [PipelineTask(fn.__name__, fn) for fn in named]


def absent(name: str) -> bool:
    """Return whether a way to run the loop needs a package that is not installed."""
    ours = name in ("plain loop", "thread and queue")  # make bench installs the others
    return not ours and find_spec(name.partition(".")[0]) is None
