"""A small training in a plain loop, as users write it, and the acts that it supports."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

ROWS, WIDTH, SIZE = 20, 4, 3
SCALE = 100
BATCHES = -(-ROWS // SIZE)
"""The number of batches in a pass."""


class Planned(Exception):
    """An error that a program asked for."""


class Stumbled(Planned):
    """An error of an iterator that then continues, without the batch."""


@dataclass(frozen=True)
class Failure:
    """A failure of "loader", "decode" or "step" at the batch with this row."""

    where: str
    row: int


class Failing:
    """The switch of planted failures."""

    at: Failure | None = None
    stumbles_at: int | None = None
    """The row of the batch that iterators lose by an error; then they go on."""

    def check(self, where: str, rows: Tensor) -> None:
        if self.at is None or self.at.where != where:
            return
        if self.at.row in (rows.reshape(-1, WIDTH)[:, 0] // SCALE).tolist():
            raise Planned(f"{where} fails at row {self.at.row}")


class Stumbling:
    """An iterator over a loader that continues after its error, as a map-style loader's may."""

    def __init__(self, loader: Any, failing: Failing) -> None:
        self._inner, self._failing = iter(loader), failing

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        rows = next(self._inner)
        row = self._failing.stumbles_at
        if row is not None and row in (rows[:, 0] // SCALE).tolist():
            raise Stumbled(f"the loader stumbles at row {row}")
        return rows


class Rows(Dataset[Tensor]):
    """A dataset whose row n is [100 n, 100 n + 1, ...]."""

    def __init__(self, failing: Failing) -> None:
        self._failing = failing

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Tensor:
        if row >= ROWS:
            raise IndexError(row)
        found = torch.arange(WIDTH) + float(SCALE * row)
        self._failing.check("loader", found)
        return found


class NoisyRows(Rows):
    """The same with noise from the default generator, drawn when a row is read."""

    def __getitem__(self, row: int) -> Tensor:
        return super().__getitem__(row) + torch.rand(WIDTH)


def _with_its_generator(failing: Failing) -> Any:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(Rows(failing), SIZE, shuffle=True, generator=generator)


LOADERS: dict[str, Callable[[Failing], Any]] = {
    "list": lambda failing: list(torch.stack([*Rows(failing)]).split(SIZE)),
    "own generator": _with_its_generator,
    "default generator": lambda failing: DataLoader(Rows(failing), SIZE, shuffle=True),
    "workers": lambda failing: DataLoader(Rows(failing), SIZE, shuffle=True, num_workers=1),
    "drawing": lambda failing: DataLoader(NoisyRows(failing), SIZE, shuffle=True),
}
"""The kinds of loaders; "drawing" draws in the middle of a pass."""


class Training:
    """Model, optimizer, scheduler and loader, with the parts of a training step."""

    def __init__(self, loader: str | Callable[[Failing], Any], *, draws: bool) -> None:
        torch.manual_seed(1)
        self.failing = Failing()
        make = LOADERS[loader] if isinstance(loader, str) else loader
        self.loader = make(self.failing)
        hidden = nn.Dropout() if draws else nn.Tanh()
        self.model = nn.Sequential(nn.Linear(WIDTH, 6), hidden, nn.Linear(6, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)

    def decode(self, rows: Tensor) -> Tensor:
        """Scale a batch; use nothing else."""
        self.failing.check("decode", rows)
        return rows / (SCALE * ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return (self.model(x) - x.sum(1, keepdim=True)).square().mean()

    def backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()

    def step(self, rows: Tensor) -> None:
        self.failing.check("step", rows)
        self.optimizer.step()
        self.scheduler.step()

    def evaluate(self) -> Tensor:
        """Evaluate the model, as in the middle of an epoch."""
        self.model.eval()
        with torch.no_grad():
            found = self.model(torch.linspace(0, 1, 2 * WIDTH).view(2, WIDTH))
        self.model.train()
        return found

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])


class PlainLoop:
    """The loop without swpipe, the reference for every way to run."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._iterator: Iterator[Tensor] | None = None
        self.replayed: list[Tensor] | None = None  # decode's results, where one is replayed

    def next(self) -> Tensor | Stumbled | None:
        """Return the loss of the next step, or the iterator's error; None at the end of a pass."""
        if self._iterator is None:
            self._iterator = Stumbling(self.training.loader, self.training.failing)
        try:
            rows = next(self._iterator)
            loss = self._step(rows)
        except StopIteration:
            self._iterator = None
            return None
        except Stumbled as error:
            return error
        except Planned:
            self._iterator = None
            raise
        return loss

    def _step(self, rows: Tensor) -> Tensor:
        x = self.training.decode(rows) if not self.replayed else self.replayed[0]
        if self.replayed is not None:
            self.replayed = [x]
        loss = self.training.forward(x)
        self.training.backward(loss)
        self.training.step(rows)
        return loss.detach()

    def leave(self) -> None:
        self._iterator = None


def through_a_file(state: Any) -> Any:
    """Return the state after saving it to a file and loading it."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)
