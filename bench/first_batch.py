"""The time until the first batch of an overlapped loop over a large table, and its peak memory."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bench.measure import Row, tolerated
from swpipe import IterContext, PipelineTask, overlap

TABLE_ROWS = 3_800_000
"""Rows of 64 numbers each: 0.9 GiB."""

MOST_MS, MOST_MIB = 100, 50


def rows(rounds: int = 3) -> list[Row]:
    """Compare with the plain loop, each in a process of its own; the median counts."""
    pairs = [(measured("overlap"), measured("plain")) for _ in range(rounds)]
    later_ms, more_mib = (
        sorted(overlapped[i] - plain[i] for overlapped, plain in pairs)[rounds // 2] for i in (0, 1)
    )
    return [
        tolerated("first batch over a table of 0.9 GiB, later", later_ms, MOST_MS, "ms"),
        tolerated("peak memory of that loop, more", more_mib, MOST_MIB, "MiB"),
    ]


def measured(loop: str) -> tuple[float, float]:
    """Return the milliseconds until the first batch, and the process's peak memory in MiB."""
    command = [sys.executable, "-m", "bench.first_batch", loop]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ms, mib = map(float, printed.split())
    return ms, mib


def run(overlapped: bool) -> None:
    """Train a table for some iterations, and print what ``measured`` returns."""
    table = nn.Embedding(TABLE_ROWS, 64, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    loader = [torch.arange(i, i + 256) for i in range(8)]

    def decode(ctx: Any) -> None:
        ctx.ids = ctx.batch * 3

    def train(ctx: Any) -> None:
        optimizer.zero_grad()
        table(ctx.ids).square().sum().backward()
        optimizer.step()

    def plainly(batch: torch.Tensor) -> IterContext:
        ctx = IterContext(batch, 0)
        decode(ctx)
        train(ctx)
        return ctx

    tasks = [PipelineTask("decode", decode, pure=True), PipelineTask("train", train)]
    begin, ms = time.perf_counter(), 0.0
    contexts: Iterable[Any] = map(plainly, loader)
    if overlapped:
        contexts = overlap(loader, tasks, device="cpu")
    for _ in contexts:
        ms = ms or 1e3 * (time.perf_counter() - begin)
    print(ms, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    run(sys.argv[1] == "overlap")
