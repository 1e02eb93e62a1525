"""Ordinary loops run with shortcuts, and train as without them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swpipe import PipelinePlan, SWPipeline
from swpipe._state.loop import LoopState
from swpipe.core.task import DeclaredIO
from swpipe.errors import ShortcutError
from tests.shortcut.loops import NAMES, Loop, differing, outcome, run, same


class Scaled(Loop):
    """A loop with a gradient scaler, which needs a gradient for every parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (self.table, self.head)]

    def backward(self, ctx: Any) -> None:
        self.scaler.scale(ctx.loss).backward()

    def step(self, ctx: Any) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()


class SparseGradients(Loop):
    """A loop with sparse gradients of the table, and an optimizer that takes no others."""

    def table_and_head(self) -> tuple[nn.Module, nn.Module]:
        return nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.dense = torch.optim.SGD(self.head.parameters(), 0.1)
        return torch.optim.SparseAdam(self.table.parameters())

    def step(self, ctx: Any) -> None:
        self.dense.step()
        self.dense.zero_grad()
        super().step(ctx)


class GradientsAsIo(Loop):
    """A loop that declares gradients, clips them in place, and zeroes them in place."""

    def io(self, name: str) -> Sequence[DeclaredIO]:
        return [DeclaredIO(self.gradients, self.set_gradients)] if name == "backward" else []

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.parameters]

    def set_gradients(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def step(self, ctx: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 0.01)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


class ClonedGradientsAsIo(GradientsAsIo):
    """A loop whose declared gradients are copies, so that only replays modify them in place."""

    def gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.parameters]


class Checkpointed(Loop):
    """A loop whose head is recomputed in the backward."""

    use_reentrant = False

    def forward(self, ctx: Any) -> None:
        out = checkpoint(self.head, ctx.rows, use_reentrant=self.use_reentrant)
        ctx.loss = out.square().mean()


class CheckpointedReentrantly(Checkpointed):
    """A loop whose head is recomputed by a backward within the backward."""

    use_reentrant = True


class Compiled(Loop):
    """A loop whose head is compiled, with its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(self.head, backend="aot_eager")

    def forward(self, ctx: Any) -> None:
        ctx.loss = self.compiled(ctx.rows).square().mean()


class AveragedByHand(Loop):
    """A loop with a list of tensors that average the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow = [parameter.detach().clone() for parameter in self.parameters]

    def step(self, ctx: Any) -> None:
        super().step(ctx)
        with torch.no_grad():
            for old, new in zip(self.shadow, self.parameters, strict=True):
                old.lerp_(new, 0.1)

    def also_trained(self) -> list[Tensor]:
        return self.shadow


LOOPS = (
    Checkpointed,
    CheckpointedReentrantly,
    Compiled,
    AveragedByHand,
    Loop,
    Scaled,
    SparseGradients,
    GradientsAsIo,
    ClonedGradientsAsIo,
)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
@pytest.mark.parametrize("make", LOOPS)
def test_training_goes_on_as_without_shortcuts(make: type[Loop]) -> None:
    """No task fails while others are shortcut, and later training is equal bit for bit."""
    pairs = combinations(NAMES, 2) if make in (Loop, GradientsAsIo) else ()
    assert differing(make, [*((name,) for name in NAMES), *pairs]) == []


class DoubleBackward(Loop):
    """A loop whose loss contains a gradient of the forward's output, in another task."""

    def forward(self, ctx: Any) -> None:
        ctx.out = self.head(ctx.rows).sum()

    def backward(self, ctx: Any) -> None:
        (slope,) = torch.autograd.grad(ctx.out, ctx.rows, create_graph=True)
        ctx.loss = slope.square().sum()
        ctx.loss.backward()


def test_a_second_derivative_is_refused_by_name() -> None:
    """A replay has none; the error names the task and says what to do. Others are replayed."""
    with pytest.raises(ShortcutError, match=r"'forward'.*second derivative.*in one task") as caught:
        differing(DoubleBackward, [("forward",)])
    assert caught.value.task == "forward"
    assert differing(DoubleBackward, [("backward",), ("step",)]) == []


class DivergedError(RuntimeError):
    """The error of the loop's own check for finite numbers."""


class Diverging(GradientsAsIo):
    """A loop that repeatedly applies a replayed gradient with momentum, and checks the weights."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters, 1e3, momentum=0.99)

    def step(self, ctx: Any) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if max(float(p.detach().abs().max()) for p in self.parameters) > 1e6:
            raise DivergedError


def test_replayed_gradients_drift_unless_state_is_restored() -> None:
    """Therefore a shortcut runs for few iterations, then state is restored; the cache stays."""
    loop = Diverging()
    serial = PipelinePlan.serial(loop.tasks)
    with SWPipeline(serial, loop.tasks) as pipe:
        before = outcome(loop)
        saved = LoopState(loop.tasks, [loop.table, loop.head, loop.optimizer], pipe.device)
        pipe.enable_shortcut("backward")
        with pytest.raises(DivergedError):
            run(pipe, 300)
        saved.restore()
        for _ in range(10):
            run(pipe, 4)
            saved.restore()
        assert same(before, outcome(loop))
