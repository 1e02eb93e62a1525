"""Samplers that are told the epoch: a pass has the batches of its own epoch, as in a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import swpipe

EPOCHS = 3


def sharded(rank: int) -> tuple[DataLoader[Any], DistributedSampler[Any]]:
    """One of two ranks' loaders, without a process group."""
    rows = TensorDataset(torch.arange(24.0))
    sampler: DistributedSampler[Any] = DistributedSampler(rows, num_replicas=2, rank=rank)
    return DataLoader(rows, batch_size=4, sampler=sampler), sampler


@pytest.mark.parametrize("rank", [0, 1])
def test_each_pass_has_the_batches_of_its_epoch(rank: int) -> None:
    """Although ``overlap`` reads the first batches to record the tasks."""

    def unpack(ctx: Any) -> None:
        (ctx.x,) = ctx.batch

    loader, sampler = sharded(rank)
    plain = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        plain.append([x.tolist() for (x,) in loader])
    assert len({str(sorted(batches)) for batches in plain}) == EPOCHS

    loader, sampler = sharded(rank)
    overlapped = []
    with swpipe.overlap(loader, [unpack], device="cpu") as loop:
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            overlapped.append([ctx.x.tolist() for ctx in loop])
    assert overlapped == plain


def test_a_first_epoch_other_than_0_is_set_before_overlap() -> None:
    """As the guide says: the first batches are read when ``overlap`` is called."""
    loader, sampler = sharded(rank=0)
    sampler.set_epoch(5)
    plain = [x.tolist() for (x,) in loader]

    def unpack(ctx: Any) -> None:
        (ctx.x,) = ctx.batch

    with swpipe.overlap(loader, [unpack], device="cpu") as loop:
        sampler.set_epoch(5)
        assert [ctx.x.tolist() for ctx in loop] == plain


def test_a_resumed_epoch_is_set_before_the_state_is_loaded() -> None:
    """The rest of the pass is that of its epoch then, and so are the passes after it."""

    def unpack(ctx: Any) -> None:
        (ctx.x,) = ctx.batch

    loader, sampler = sharded(rank=1)
    wanted = []
    with swpipe.overlap(loader, [unpack], device="cpu") as loop:
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for ctx in loop:
                if ctx.iter_idx == 3:
                    state = loop.state_dict()
                if ctx.iter_idx > 3:
                    wanted.append(ctx.x.tolist())

    loader, sampler = sharded(rank=1)
    with swpipe.overlap(loader, [unpack], device="cpu") as loop:
        sampler.set_epoch(1)
        loop.load_state_dict(state)
        resumed = []
        for epoch in range(1, EPOCHS):
            sampler.set_epoch(epoch)
            resumed += [ctx.x.tolist() for ctx in loop]
    assert resumed == wanted
    assert len(resumed) == 5
