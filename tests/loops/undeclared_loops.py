"""Small loops in which one part reads a state and another writes it, and nothing is declared.

``LOOPS`` has their states by name. A loop is made anew for each run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from swpipe import DeclaredIO, IterContext, PipelineTask
from tests.loops import undeclared_libraries  # noqa: F401, enters its states
from tests.loops.undeclared_states import STATES, Job, Kind

BATCHES = 12

LOOPS: dict[str, Kind] = STATES
"""Name to the state."""

DUE = {"always": lambda i: True, "fourth": lambda i: i % 4 == 3, "once": lambda i: i == 7}


class Loop:
    """A loop: decode, train, step, and its body.

    Args:
        kind: The state.
        folder: For files.
        pure: Whether ``decode`` and the loader leave the state to the other tasks, and ``decode``
            says so.
        declared: Whether all tasks say what they touch, which is the model; for a state that is
            the loader's and the body's alone.
    """

    def __init__(
        self, kind: Kind, folder: Path, *, pure: bool = False, declared: bool = False
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        draws = torch.Generator().manual_seed(1)
        batches = [torch.rand(4, generator=draws) for _ in range(BATCHES)]
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.optimizer = SGD([self.weight], lr=0.001, momentum=0.9)
        self.state = kind.make(Job(self.weight, self.optimizer, batches, folder))
        self._due = DUE[kind.when]
        moved = {"decode": "train", "loader": "train"} if pure else {}
        self._reader = moved.get(kind.reader, kind.reader)
        self._writer = moved.get(kind.writer, kind.writer)
        self.loader: Iterable[Tensor] = batches
        assert kind.own_loader == (self.state.loader is not None)
        if self.state.loader is not None:
            self.loader = self.state.loader
        elif "loader" in (self._reader, self._writer):
            self.loader = self._batches(batches)
        self.uses_loader = self.loader is not batches  # as the other part may
        model = [DeclaredIO(state="model")] if declared else []
        self.tasks = [
            PipelineTask("decode", self._decode, pure=pure or declared),
            PipelineTask("train", self._train, io=model),
            PipelineTask("step", self._step, io=model),
        ]
        self.losses: list[Tensor] = []
        self.seen: list[float] = []

    def _value(self, part: str) -> float:
        return self.state.read() if part == self._reader else 1.0

    def _write(self, part: str, number: int) -> None:
        if part == self._writer and self._due(number):
            self.state.write(number)

    def _batches(self, batches: list[Tensor]) -> Iterator[Tensor]:
        for number, batch in enumerate(batches):
            self._write("loader", number)
            yield batch * self._value("loader")

    def _decode(self, ctx: Any) -> None:
        ctx.x = ctx.batch * self._value("decode")
        self._write("decode", ctx.iter_idx)

    def _train(self, ctx: Any) -> None:
        with torch.enable_grad():
            ctx.loss = ((self.weight * ctx.x).sum() * self._value("train") - 1) ** 2
            self.optimizer.zero_grad()
            ctx.loss.backward()
        self._write("train", ctx.iter_idx)

    def _step(self, ctx: Any) -> None:
        self.optimizer.step()
        self._write("step", ctx.iter_idx)

    def run(self, contexts: Iterable[Any]) -> list[Any]:
        """Run the loop's body; returns losses, parameters, and the state."""
        try:
            for ctx in contexts:
                self.losses.append(ctx.loss.detach().double())
                if self._reader == "body":
                    self.seen.append(self.state.read())
                self._write("body", ctx.iter_idx)
            shown = (self.state.shown or self.state.read)()
        finally:
            self.state.close()
        return [self.losses, self.weight.detach(), self.weight.grad, self.seen, shown]

    def plain(self) -> list[Any]:
        """Run it as a plain loop."""
        return self.run(self._plain())

    def _plain(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            ctx = IterContext(batch, number)
            for task in self.tasks:
                task(ctx)
            yield ctx
