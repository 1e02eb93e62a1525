"""A small training on a device, and plans for it that must give the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from tests import backend
from tests.device.accelerator.work import DEVICE, SIMULATED, spin
from tests.inference.helpers import WORD
from tests.support.plans_for_tests import NOBODY_ELSE

ROWS = 64
NAMES = ("copy", "scale", "forward", "backward", "step", "count", "report")
DEPS = [
    ("scale", "copy"),
    ("forward", "scale"),
    ("backward", "forward"),
    ("step", "backward"),
    ("report", "step"),
    ("report", "count"),
]
CROSS = [("forward", "step"), ("count", "report"), ("report", "report")]


class Training:
    """A training with noise, dropout, Adam, and the mean of all losses so far.

    Args:
        device: The device of the model.
        delays: Draws delays of the device that are strewn between its kernels; with another seed
            the same work has another timing.
    """

    def __init__(
        self, device: torch.device | str = DEVICE, delays: random.Random | None = None
    ) -> None:
        self.device, self._delays = torch.device(device), delays
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.model = nn.Sequential(
                nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)
            )
        self.model.to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.steps = torch.zeros((), dtype=torch.int32, device=self.device)
        self.total = torch.zeros((), device=self.device)

    def tasks(self) -> list[PipelineTask]:
        """Return the tasks of a training step."""
        return [self._task(getattr(self, name)) for name in NAMES]

    def _task(self, fn: Callable[[IterContext], None]) -> PipelineTask:
        def delayed(ctx: IterContext) -> None:
            if self._delays is not None:
                spin(self._delays.uniform(0.0, 1.0))
            fn(ctx)
            if self._delays is not None:
                spin(self._delays.uniform(0.0, 0.3))

        draws = fn.__name__ in ("scale", "forward")
        io = [WORD, NOBODY_ELSE] if draws else [WORD]
        return PipelineTask(fn.__name__, delayed, io, random=draws)

    def copy(self, ctx: IterContext) -> None:
        ctx.raw, ctx.label = (part.to(self.device, non_blocking=True) for part in ctx.batch)

    def scale(self, ctx: IterContext) -> None:
        ctx.x = (ctx.raw - ctx.raw.mean(dim=0)) + 0.01 * torch.randn_like(ctx.raw)
        del ctx.raw

    def forward(self, ctx: IterContext) -> None:
        ctx.loss = nn.functional.mse_loss(self.model(ctx.x).squeeze(1), ctx.label)

    def backward(self, ctx: IterContext) -> None:
        self.optimizer.zero_grad()
        ctx.loss.backward()

    def step(self, ctx: IterContext) -> None:
        self.optimizer.step()

    def count(self, ctx: IterContext) -> None:
        self.steps.add_(1)

    def report(self, ctx: IterContext) -> None:
        self.total += ctx.loss.detach()
        ctx.mean = self.total / self.steps

    def owners(self) -> dict[str, Any]:
        """Return all objects that training changes."""
        names = ("model", "optimizer", "steps", "total")
        return {name: getattr(self, name) for name in names}

    def tensors(self) -> list[Tensor]:
        """Return all tensors that training changes."""
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return [*self.model.parameters(), *moments, self.steps, self.total]


def schedule(**changes: TaskSchedule) -> dict[str, TaskSchedule]:
    """Return a schedule in stage 2 on the caller's stream and thread, with some changes."""
    return {name: changes.get(name, TaskSchedule(2)) for name in NAMES}


PLANS = {
    "one stream": PipelinePlan(schedule(), DEPS, CROSS),
    "copy on its stream": PipelinePlan(
        schedule(copy=TaskSchedule(0, "memcpy"), scale=TaskSchedule(1)), DEPS, CROSS
    ),
    "copy from a thread": PipelinePlan(
        schedule(copy=TaskSchedule(0, "memcpy", "io"), scale=TaskSchedule(1, "prepare", "io")),
        DEPS,
        CROSS,
        pipeline_depth=4,
    ),
    "all on streams of their own": PipelinePlan(
        schedule(
            copy=TaskSchedule(0, "memcpy"),
            scale=TaskSchedule(1, "prepare"),
            report=TaskSchedule(3, "report"),
        ),
        DEPS,
        CROSS,
        pipeline_depth=5,
    ),
    "three threads, three streams": PipelinePlan(
        schedule(
            copy=TaskSchedule(0, "memcpy", "io"),
            scale=TaskSchedule(1, "prepare", "cpu"),
            report=TaskSchedule(3, "report", "io"),
        ),
        DEPS,
        CROSS,
        pipeline_depth=6,
    ),
    "backward on another thread": PipelinePlan(
        schedule(
            copy=TaskSchedule(0, "memcpy"),
            scale=TaskSchedule(1),
            backward=TaskSchedule(2, None, "train", globally_ordered=True),
        ),
        DEPS,
        CROSS,
    ),
}


@cache
def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return the same pinned batches each time."""
    draw = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(ROWS, 32, generator=draw).pin_memory(),
            torch.randn(ROWS, generator=draw).pin_memory(),
        )
        for _ in range(count)
    ]


def means(pipe: SWPipeline, data: list[Any]) -> list[Tensor]:
    """Return the means of some iterations."""
    found = []
    for ctx in pipe.iterate(data):
        found.append(ctx.mean)
        del ctx
    return found


def on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors on the host, after a synchronize."""
    torch.accelerator.synchronize()
    return [tensor.detach().cpu() for tensor in tensors]


def trained(
    plan: PipelinePlan | None,
    seed: int,
    *data: list[Any],
    shortcuts: tuple[str, ...] = (),
    check_effects: bool | None = None,
) -> list[Tensor]:
    """Train under a plan, or serially if it is None, with the delays of a seed.

    Each of ``data`` is a pass over batches; every second pass has the shortcuts.
    """
    training = Training(delays=random.Random(seed))
    tasks = training.tasks()
    found: list[Tensor] = []
    if plan is None:
        plan = PipelinePlan.serial(tasks)
    with SWPipeline(plan, tasks, device=DEVICE, seed=11, check_effects=check_effects) as pipe:
        for number, one in enumerate(data):
            with pipe.shortcut(*shortcuts) if number % 2 else nullcontext():
                found += means(pipe, one)
    return on_host([*found, *training.tensors()])


@contextmanager
def badly() -> Iterator[None]:
    """Use late streams and poisoned memory on the test backend."""
    if not SIMULATED:
        yield
        return
    with backend.misbehaving(late_streams=100.0, poison=True):
        yield


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether all bits are equal."""
    return len(one) == len(other) and all(map(torch.equal, one, other))
