"""Random loops whose loader or body draws random numbers, each with its plain loop.

A program defines what each pull and each body draws, and how long it takes. The plain loop is the
reference for ``swpipe.ahead``.
"""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

import swpipe
from swpipe.errors import PlanError


def _for_a_moment_torch() -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        time.sleep(2e-4)
        return float(torch.rand(1))


def _for_a_moment_fake_data() -> float:
    state = torch.get_rng_state()
    torch.manual_seed(5)
    drawn = float(torch.randn(8).sum())
    time.sleep(2e-4)
    torch.set_rng_state(state)
    return drawn


def _for_a_moment_numpy() -> float:
    state = np.random.get_state()
    np.random.seed(3)
    drawn = float(np.random.rand())
    time.sleep(2e-4)
    np.random.set_state(state)
    return drawn


def _for_a_moment_python() -> float:
    state = random.getstate()
    random.seed(3)
    drawn = random.random()
    time.sleep(2e-4)
    random.setstate(state)
    return drawn


def _shuffled() -> float:
    rows = [*range(7)]
    random.shuffle(rows)
    return float(rows[0])


DRAWS: dict[str, Callable[[], float]] = {
    "torch.rand": lambda: float(torch.rand(2).sum()),
    "torch.randint": lambda: float(torch.randint(0, 9, (1,))),
    "in place": lambda: float(torch.empty(3).normal_().sum()),
    "dropout": lambda: float(functional.dropout(torch.ones(4)).sum()),
    "an operator": lambda: float(torch.ops.aten.rand([2]).sum()),
    "explicit": lambda: float(torch.rand(1, generator=torch.default_generator)),
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "shuffle": _shuffled,
    "numpy": lambda: float(np.random.rand()),
    "randn": lambda: float(np.random.randn()),
    "permutation": lambda: float(np.random.permutation(7)[0]),
    "fork_rng": _for_a_moment_torch,
    "FakeData": _for_a_moment_fake_data,
    "numpy for a moment": _for_a_moment_numpy,
    "Python for a moment": _for_a_moment_python,
}

FOR_A_MOMENT = ("fork_rng", "FakeData", "numpy for a moment", "Python for a moment")
"""Changes that leave no trace in the states."""

WHEN: dict[str, Callable[[random.Random, int], Callable[[int], bool]]] = {
    "never": lambda rng, size: lambda number: False,
    "always": lambda rng, size: lambda number: True,
    "once": lambda rng, size: _chosen({rng.randrange(size)}),
    "rarely": lambda rng, size: _chosen({n for n in range(size) if rng.random() < 0.2}),
    "each epoch": lambda rng, size: lambda number: number % 7 == 0,
    "from the middle on": lambda rng, size: lambda number: number >= size // 2,
    "in the first half": lambda rng, size: lambda number: number < size // 2,
}


def _generator_of(name: str) -> str:
    """Return the name of the default generator that a draw uses."""
    if name in ("random", "gauss", "shuffle", "Python for a moment"):
        return "python"
    return "numpy" if name in ("numpy", "randn", "permutation", "numpy for a moment") else "torch"


def _chosen(numbers: set[int]) -> Callable[[int], bool]:
    return lambda number: number in numbers


KINDS = (
    *("generator", "iterable", "iterator", "dataset", "shuffled dataset", "stream"),
    *("list", "tensors", "shuffled tensors"),
)

MADE_BEFORE = ("list", "tensors", "shuffled tensors")
"""Kinds whose loader draws nothing."""


@dataclass(frozen=True)
class Side:
    """The draws of the loader or the body: which, when, and with which pauses."""

    draws: tuple[str, ...]
    when: str
    pauses: tuple[float, ...]
    late: bool

    def use(self, number: int, draws_now: bool) -> float:
        """Pause, and draw before or after the pause."""
        pause = self.pauses[number % len(self.pauses)]
        if self.late and pause:
            time.sleep(pause)
        drawn = sum((DRAWS[name]() for name in self.draws), 0.0) if draws_now else 0.0
        if not self.late and pause:
            time.sleep(pause)
        return drawn


class Program:
    """A loop, derived from a seed.

    Attributes:
        kind: The kind of the loader.
        size: The number of batches in a pass.
        loader: The draws of the loader.
        body: The draws of the body.
        functions: The number of functions that run ahead.
        workers: Threads for them.
        draws: The declaration.
        leaves: The number of batches after which each pass is left; 0 for never.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.kind = rng.choice(KINDS)
        self.size = rng.randint(6, 26)
        self.loader = _side(rng, draws=self.kind not in MADE_BEFORE)
        self.body = _side(rng, draws=True)
        self.functions = rng.choice((0, 0, 1, 2))
        self.workers = rng.randint(1, 4) if self.functions else 1
        self.leaves = rng.choice((0, 0, rng.randint(1, self.size)))
        self.passes = rng.randint(1, 3)
        self.draws = rng.choice((None, None, False)) if self.loader.when == "never" else None
        self._rng = rng

    def __repr__(self) -> str:
        said = f"{self.kind} of {self.size}, {self.functions} functions, {self.workers} workers"
        return f"{self.seed}: {said}, draws={self.draws}\n  {self.loader}\n  {self.body}"

    def _chances(self) -> tuple[Callable[[int], bool], Callable[[int], bool]]:
        """Return functions that tell whether the loader and the body draw at a batch."""
        chances = random.Random(self.seed)
        pulls = WHEN[self.loader.when](chances, self.size)
        return pulls, WHEN[self.body.when](chances, self.size)

    @property
    def leaves_no_trace(self) -> bool:
        """Whether the states may fail to show that both sides draw from one generator.

        As the guide says: neither draw is seen in the first four iterations, which run serially,
        and one side restores the generator each time, or draws only once.
        """
        pulls, bodies = self._chances()
        size = self.leaves or self.size
        lasting = [name for name in self.body.draws if name not in FOR_A_MOMENT]
        seen = any(map(pulls, range(1, min(5, size))))
        if seen or (lasting and any(map(bodies, range(min(4, size))))):
            return False
        shared = {*map(_generator_of, self.loader.draws)} & {*map(_generator_of, self.body.draws)}
        draws = [
            [name for name in side.draws if _generator_of(name) in shared]
            for side in (self.loader, self.body)
        ]
        counts = [self.passes * sum(map(when, range(size))) for when in (pulls, bodies)]
        moments = [all(name in FOR_A_MOMENT for name in names) for names in draws]
        return bool(shared) and all(counts) and (any(moments) or 1 in counts)

    def run(self, over: Callable[[Any], Iterable[Any]]) -> list[Any]:
        """Return what the loop has seen, and the next draws of the generators."""
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed)
        pulls, bodies = self._chances()

        def pull(number: int) -> Tensor:
            return torch.tensor([float(number), self.loader.use(number, pulls(number))])

        loader = over(_loader(self.kind, self.size, pull))
        seen: list[Any] = []
        for _ in range(self.passes):
            for number, batch in enumerate(islice(loader, self.leaves or None)):
                seen.append(batch.tolist())
                seen.append(self.body.use(number, bodies(number)))
        return [*seen, float(torch.rand(1)), random.random(), float(np.random.rand())]

    def ahead(self, loader: Any) -> Any:
        """Return the loop under test."""
        functions = [_scaled, _shifted][: self.functions]
        return swpipe.ahead(
            loader, *functions, workers=self.workers, draws=self.draws, device="cpu"
        )

    def plain(self, loader: Any) -> Any:
        """Return the reference loop."""
        functions = [_scaled, _shifted][: self.functions]
        return _Plain(loader, functions)


class _Plain:
    """A plain loop over a loader and functions."""

    def __init__(self, loader: Any, functions: list[Callable[[Tensor], Tensor]]) -> None:
        self.loader, self.functions = loader, functions

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.loader:
            for function in self.functions:
                batch = function(batch)  # noqa: PLW2901
            yield batch


def _scaled(batch: Tensor) -> Tensor:
    return batch * 2


def _shifted(batch: Tensor) -> Tensor:
    return batch + 1


def _side(rng: random.Random, *, draws: bool) -> Side:
    when = rng.choice([*WHEN]) if draws and rng.random() < 0.8 else "never"
    names = tuple(rng.sample([*DRAWS], rng.choice((1, 1, 2))))
    pauses = tuple(rng.choice((0.0, 0.0, 1e-4, 1e-3)) for _ in range(26))
    return Side(names, when, pauses, rng.random() < 0.5)


class _Pulled(Dataset[Tensor]):
    def __init__(self, size: int, pull: Callable[[int], Tensor]) -> None:
        self.size, self.pull = size, pull

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Tensor:
        if not 0 <= number < self.size:
            raise IndexError(number)
        return self.pull(number)


class _Stream(IterableDataset[Tensor]):
    def __init__(self, size: int, pull: Callable[[int], Tensor]) -> None:
        self.size, self.pull = size, pull

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.pull, range(self.size))


def _loader(kind: str, size: int, pull: Callable[[int], Tensor]) -> Any:
    if kind == "generator":
        return (pull(number) for number in range(size))
    if kind == "iterator":
        return map(pull, range(size))
    if kind == "iterable":
        return _Pulled(size, pull)
    if kind == "stream":
        return DataLoader(_Stream(size, pull), batch_size=1)
    if "dataset" in kind:
        return DataLoader(_Pulled(size, pull), batch_size=1, shuffle="shuffled" in kind)
    rows = torch.arange(2.0 * size).reshape(size, 2)
    if kind == "list":
        return [*rows]
    return DataLoader([*rows], batch_size=1, shuffle="shuffled" in kind)  # type: ignore[arg-type]


def outcomes(seeds: Iterable[int]) -> tuple[Counter[str], list[str]]:
    """Count how programs ended, and return those that differ from the plain loop without an error.

    Programs whose states may show nothing are counted apart.
    """
    counts, silent = Counter[str](), list[str]()
    for seed in seeds:
        program = Program(seed)
        expected = program.run(program.plain)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                found = program.run(program.ahead)
            except (RuntimeError, PlanError):
                counts["refused"] += 1
                continue
        drawn_ahead = any("the loader has drawn ahead" in str(one.message) for one in told)
        end = "equal" if found == expected else "told" if drawn_ahead else "silent"
        if end == "silent" and program.leaves_no_trace:
            end = "no trace"
        counts[end] += 1
        if end == "silent":
            silent.append(repr(program))
    return counts, silent
