"""Loops over data that ends at different steps on each rank, and over the same data made even.

As a program, it trains one of them on two ranks, where neither TorchRec nor FBGEMM can be imported:
``python -m tests.loops.even_jobs RANK STORE``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import swpipe
from swpipe import EvenData
from swpipe.loops import pad_with

ROWS = (22, 13)
"""Of each rank; with 4 in a batch, 6 batches and 4."""

EPOCHS = 2
LEFT = 3  # steps after which a pass is left

PAD = [torch.zeros(4, 4)]


class Training:
    """A model on all ranks, with dropout, whose steps need all of them."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
        if kind == "fsdp":
            fully_shard(self.model[0])
            fully_shard(self.model)
        self.called: nn.Module = (
            DistributedDataParallel(self.model) if kind == "ddp" else self.model
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.losses: list[Tensor] = []

    def step(self, x: Tensor) -> None:
        """The body of a plain loop."""
        loss = self.called(x * 2).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def train(self, ctx: Any) -> None:
        """The same as a task."""
        self.step(ctx.batch[0])

    def result(self) -> list[Tensor]:
        """Losses, parameters and the state of the random numbers."""
        own = [getattr(one, "_local_tensor", one).detach() for one in self.model.parameters()]
        return [*self.losses, *own, torch.get_rng_state()]


def own_loader() -> DataLoader[Any]:
    """This rank's data, in an order that is drawn anew for each pass."""
    rank = dist.get_rank()
    rows = torch.randn(ROWS[rank], 4, generator=torch.Generator().manual_seed(rank))
    return DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)


def made_even(loader: Iterable[Any], ends: str) -> list[Any]:
    """One pass over it, cut or padded as a plain loop needs it; no ranks are asked."""
    counts = [-(-rows // 4) for rows in ROWS]
    steps = min(counts) if ends == "stop" else max(counts)
    batches = list(loader)
    return (batches + [PAD] * steps)[:steps]


def expected(kind: str, ends: str, left: int | None) -> list[Tensor]:
    """What a plain loop computes over data made even."""
    training, loader = Training(kind), own_loader()
    for epoch in range(EPOCHS):
        for x, *_ in made_even(loader, ends)[: left if epoch == 0 else None]:
            training.step(x)
    return training.result()


def _resumed(loop: Any, again: Any, step: Callable[[Any], None]) -> None:
    """The first pass is left after a state is saved, and another loop goes on with it."""
    for number, item in enumerate(loop, start=1):
        step(item)
        if number == LEFT:
            state = loop.state_dict()
            break
    again.load_state_dict(state)
    for _ in range(EPOCHS):
        for item in again:
            step(item)


def trained(kind: str, ends: Any, way: str, then: str) -> list[Tensor]:
    """What a loop over ``EvenData`` computes.

    Args:
        kind: "ddp" or "fsdp".
        ends: As of ``EvenData``.
        way: "plain", "ahead", "overlap", or "overlapped task": the step is a task.
        then: What becomes of the first pass: it is "ended", "left", or "resumed".
    """
    training = Training(kind)
    pad = pad_with(PAD) if ends == "pad" else None

    def loop_of(even: EvenData) -> Any:
        loader = even.loader(own_loader())
        if way == "plain":
            return loader
        if way == "ahead":
            return swpipe.ahead(loader, lambda batch: [batch[0].clone()])
        tasks = [training.train] if way == "overlapped task" else [_decode]
        return swpipe.overlap(loader, tasks, pull_ahead=True)

    def step(item: Any) -> None:
        if way != "overlapped task":
            training.step(item.batch[0] if way == "overlap" else item[0])

    with EvenData(ends, pad=pad, timeout_s=60.0) as even:
        loop = loop_of(even)
        if then == "resumed":
            _resumed(loop, loop_of(even), step)
            return training.result()
        for epoch in range(EPOCHS):
            for number, item in enumerate(loop, start=1):
                step(item)
                if (then, epoch, number) == ("left", 0, LEFT):
                    break
    return training.result()


@swpipe.task(pure=True)
def _decode(ctx: Any) -> None:
    ctx.batch = [ctx.batch[0].clone()]


def differs(kind: str, ends: str, way: str, then: str) -> list[int]:
    """Places of the results that are not equal, bit for bit."""
    right = expected(kind, ends, LEFT if then == "left" else None)
    found = trained(kind, ends, way, then)
    if len(right) != len(found):
        return [-1, len(right), len(found)]
    return [k for k, (a, b) in enumerate(zip(right, found, strict=True)) if not torch.equal(a, b)]


class _NotInstalled:
    """Finds that TorchRec and FBGEMM are not there."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in ("torchrec", "fbgemm_gpu"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main(rank: str, store: str) -> Iterator[list[int]]:
    """Train without TorchRec."""
    sys.meta_path.insert(0, _NotInstalled())  # type: ignore[arg-type]
    if {"torchrec", "fbgemm_gpu"} & sys.modules.keys():
        raise RuntimeError("TorchRec is imported already")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    for kind, ends, way in (("ddp", "stop", "ahead"), ("fsdp", "pad", "plain")):
        yield differs(kind, ends, way, "ended")
    dist.destroy_process_group()


if __name__ == "__main__":
    print(list(main(*sys.argv[1:])))
