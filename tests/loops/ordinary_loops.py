"""A loader, the functions of an ordinary training loop, and loaders with a state."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import swpipe
from swpipe.device import resolve
from swpipe.loops.draws import LoaderDraws
from swpipe.loops.pass_generators import PassGenerators
from swpipe.loops.pass_record import PassRecord
from swpipe.loops.pulled_loader import PulledLoader

Fn = Callable[[Any], None]
ROWS = 22  # the last batch of 4 has 2


class Rows(Dataset[Tensor]):
    """A dataset of random rows, made once."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(5)
        self.rows = torch.randn(ROWS, 4, generator=draws)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class NoisyRows(Rows):
    """A dataset with random augmentation, drawn when a row is read."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + 0.1 * random.random() * torch.rand(4)


def batches(rows: Dataset[Tensor] | None = None, **options: Any) -> DataLoader[Tensor]:
    """Return a loader of batches of 4 rows."""
    return DataLoader(rows or Rows(), **{"batch_size": 4, **options})


def record_of(loader: Any) -> PassRecord:
    """Return the record of a pass over a loader, before its first pull."""
    generators = PassGenerators(loader, resolve("cpu"))
    draws = LoaderDraws(generators)
    return PassRecord(PulledLoader(loader, generators, draws, ahead=True))


class Training:
    """The parts of an ordinary loop, with a model from 4 numbers to 1; a loop may replace some."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)

    def decode(self, ctx: Any) -> None:
        ctx.x = ctx.batch * 2

    def forward(self, ctx: Any) -> None:
        ctx.loss = (self.model(ctx.x) - ctx.x.sum(1, keepdim=True)).square().mean()

    def backward(self, ctx: Any) -> None:
        self.optimizer.zero_grad()
        ctx.loss.backward()

    def step(self, ctx: Any) -> None:
        self.optimizer.step()

    def functions(self, **others: Fn) -> list[Fn]:
        usual: dict[str, Fn] = {
            "decode": self.decode,
            "forward": self.forward,
            "backward": self.backward,
            "step": self.step,
        }
        found = usual | others
        for name, function in others.items():
            function.__name__ = name
        return list(found.values())

    def tasks(self, **others: Fn) -> list[Any]:
        """Return the functions as tasks, with decode declared pure."""
        decode, *rest = self.functions(**others)
        return [swpipe.task(pure=True)(decode), *rest]

    def state(self) -> Any:
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])


class StatefulRows:
    """A loader with a state, which shuffles by a generator of its own."""

    def __init__(self) -> None:
        self.at, self.epoch = 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < 6:
            order = random.Random(self.epoch).sample(range(6), 6)
            self.at += 1
            yield Rows().rows.split(4)[order[self.at - 1]]
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


def with_generator() -> torch.Generator:
    """Return a generator, as for a loader."""
    return torch.Generator().manual_seed(5)


def torchdata(rows: Any = None, **options: Any) -> Any:
    """Return a torchdata loader of shuffled batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(rows or Rows(), **{"batch_size": 4, "shuffle": True, **options})
