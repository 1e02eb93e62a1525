"""G1 on an accelerator: every plan gives the serial run's bits, whatever the streams' timing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from tests.device.accelerator.work import DEVICE, spin, warm_up
from tests.support.plans_for_tests import NOBODY_ELSE

ITERATIONS = 25
ROWS = 64
DEPS = [
    ("scale", "copy"),
    ("forward", "scale"),
    ("backward", "forward"),
    ("step", "backward"),
    ("report", "step"),
]
CROSS = [("forward", "step"), ("report", "report")]


@dataclass
class Training:
    """A small model in training, with delays of the device strewn between its kernels.

    Attributes:
        delays: Draws them; with another seed the same work has another timing.
        losses: Of each iteration, as the last task read them.
    """

    delays: random.Random
    losses: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(
            nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)
        ).to(DEVICE)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.total = torch.zeros((), device=DEVICE)

    def tasks(self) -> list[PipelineTask]:
        """The training step, as tasks."""
        steps: list[tuple[Callable[[IterContext], None], bool]] = [
            (self.copy, False),
            (self.scale, True),
            (self.forward, True),
            (self.backward, False),
            (self.step, False),
            (self.report, False),
        ]
        return [
            PipelineTask(f.__name__, self._delayed(f), [NOBODY_ELSE] * draws, random=draws)
            for f, draws in steps
        ]

    def _delayed(self, fn: Callable[[IterContext], None]) -> Callable[[IterContext], None]:
        def delayed(ctx: IterContext) -> None:
            spin(self.delays.uniform(0.0, 1.0))
            fn(ctx)
            spin(self.delays.uniform(0.0, 0.3))

        return delayed

    def copy(self, ctx: IterContext) -> None:
        ctx.raw, ctx.label = (part.to(DEVICE, non_blocking=True) for part in ctx.batch)

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

    def report(self, ctx: IterContext) -> None:
        self.total += ctx.loss.detach()
        self.losses.append(self.total.clone())

    def result(self) -> list[Tensor]:
        """All that training has come to, on the host."""
        torch.accelerator.synchronize()
        state = [*self.losses, *self.model.parameters()]
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return [tensor.detach().cpu() for tensor in (*state, *moments)]


def schedule(**changes: TaskSchedule) -> dict[str, TaskSchedule]:
    """All tasks in stage 0 on the caller's stream and thread, but for the changes."""
    names = ("copy", "scale", "forward", "backward", "step", "report")
    return {name: changes.get(name, TaskSchedule(2)) for name in names}


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


def batches() -> list[tuple[Tensor, Tensor]]:
    """The same pinned batches every time."""
    draw = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(ROWS, 32, generator=draw).pin_memory(),
            torch.randn(ROWS, generator=draw).pin_memory(),
        )
        for _ in range(ITERATIONS)
    ]


def train(plan: PipelinePlan | None, seed: int) -> list[Tensor]:
    """Train under a plan, or serially, with the delays of ``seed``."""
    warm_up()
    training = Training(random.Random(seed))
    tasks = training.tasks()
    with SWPipeline(plan or PipelinePlan.serial(tasks), tasks, device=DEVICE, seed=11) as pipe:
        report = pipe.run_serial(batches()) if plan is None else pipe.run(batches())
    assert report.iterations == ITERATIONS
    return training.result()


@cache
def serially() -> list[Tensor]:
    """What the serial run comes to."""
    return train(None, 100)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_to_the_same_bits(name: str, seed: int) -> None:
    """Losses, parameters and the optimizer's state equal the serial run's, dropout included."""
    serial, piped = serially(), train(PLANS[name], seed)
    assert len(serial) == len(piped)
    assert all(torch.equal(a, b) for a, b in zip(serial, piped, strict=True))


@pytest.mark.usefixtures("deterministic")
def test_recording_all_events_changes_nothing() -> None:
    """The switch for hunting trouble leaves the numbers alone."""
    plan = PLANS["three threads, three streams"]
    training = Training(random.Random(1))
    tasks = training.tasks()
    with SWPipeline(plan, tasks, device=DEVICE, seed=11, record_all_events=True) as pipe:
        pipe.run(batches())
    assert all(torch.equal(a, b) for a, b in zip(serially(), training.result(), strict=True))


@pytest.mark.usefixtures("deterministic")
def test_shortcuts_replay_on_streams() -> None:
    """A task that is shortcut in mid-run gives its cached outputs, on its own stream."""
    plan = PLANS["all on streams of their own"]
    training = Training(random.Random(2))
    tasks = training.tasks()
    batch = batches()[0]
    with SWPipeline(plan, tasks, device=DEVICE, seed=11) as pipe, pipe.shortcut("copy", "scale"):
        inputs = [ctx.x.clone() for ctx in pipe.iterate([batch] * 8)]
    torch.accelerator.synchronize()
    assert all(torch.equal(inputs[0], x) for x in inputs)
