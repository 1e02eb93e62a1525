"""Ordinary training loops, written as tasks, and their training with and without shortcuts.

``trained`` runs a loop, and returns everything that was trained; ``differing`` shortcuts tasks for
some iterations in between and restores the state, as a profile does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from swpipe import PipelinePlan, SWPipeline
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.profiler.trial import trial_state

BEFORE, WITHIN, AFTER = 2, 4, 2
"""Iterations before the shortcuts, with each of them, and afterwards."""

BATCH = torch.tensor([1, 3, 3, 5])

NAMES = ("embed", "forward", "backward", "step")


class Loop:
    """A loop of embed, forward, backward and step; subclasses replace parts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.table, self.head = self.table_and_head()
        self.parameters = [*self.table.parameters(), *self.head.parameters()]
        self.optimizer = self.make_optimizer()

    def table_and_head(self) -> tuple[nn.Module, nn.Module]:
        return nn.Embedding(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters, 0.1, momentum=0.9)

    def also_trained(self) -> list[Tensor]:
        """Return the trained tensors other than the parameters."""
        return []

    @property
    def tasks(self) -> list[PipelineTask]:
        return [PipelineTask(name, getattr(self, name), io=self.io(name)) for name in NAMES]

    def io(self, name: str) -> Sequence[DeclaredIO]:
        return ()

    def embed(self, ctx: Any) -> None:
        ctx.rows = self.table(ctx.batch)

    def forward(self, ctx: Any) -> None:
        ctx.loss = self.head(ctx.rows).square().mean()

    def backward(self, ctx: Any) -> None:
        ctx.loss.backward()

    def step(self, ctx: Any) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@cache
def trained(make: Callable[[], Loop]) -> list[Tensor]:
    """Return what a loop trains in ``BEFORE + AFTER`` iterations."""
    loop = make()
    with SWPipeline(PipelinePlan.serial(loop.tasks), loop.tasks) as pipe:
        run(pipe, BEFORE + AFTER)
    return outcome(loop)


def differing(
    make: Callable[[], Loop], shortcuts: Iterable[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return the shortcuts after which training differs, although the state was restored.

    Each shortcut stands for ``WITHIN`` iterations; after ``AFTER`` more, the state is restored
    again.
    """
    loop, found = make(), []
    with SWPipeline(PipelinePlan.serial(loop.tasks), loop.tasks) as pipe:
        run(pipe, BEFORE)
        saved = trial_state(pipe, BATCH, None)
        for names in shortcuts:
            try:
                with pipe.shortcut(*names):
                    run(pipe, WITHIN)
            finally:
                saved.restore()
            run(pipe, AFTER)
            if not same(trained(make), outcome(loop)):
                found.append(names)
            saved.restore()
    return found


def run(pipe: SWPipeline, count: int) -> None:
    """Run some iterations on one batch, and hold no context."""
    for _ in pipe.iterate(repeat(BATCH, count)):
        pass


def outcome(loop: Loop) -> list[Tensor]:
    """Return the parameters, the optimizer's state, and what else is trained."""
    state = [
        value
        for parameter in loop.parameters
        for value in loop.optimizer.state[parameter].values()
        if isinstance(value, Tensor)
    ]
    return [local(one.detach()) for one in (*loop.parameters, *state, *loop.also_trained())]


def local(tensor: Any) -> Tensor:
    """Return the rank's part of a tensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.clone()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two outcomes are equal bit for bit."""
    return len(a) == len(b) and all(map(torch.equal, a, b))
