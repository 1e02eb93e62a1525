"""What tasks share outside slots is safe between two periods, as the seed's users expect."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe.analysis.happens_before import HappensBefore
from swpipe.core.resolved import resolve_plan
from swpipe.schedulable import (
    SchedulablePipeline,
    Schedule,
    SequentialExecutor,
    Task,
    TaskContext,
    ThreadedExecutor,
)
from tests.schedulable.work import one_stage, pool

BATCHES = [torch.full((3, 4), 0.1 * n) for n in range(12)]


class Model:
    """A model that is trained, its parts as tasks of a schedule in which forward is ahead.

    Attributes:
        forwards: How many have run.
    """

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.forwards = 0
        self._pause = pause

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(batch).square().sum()
        self.forwards += 1
        return loss

    def schedule(self, **sync: Any) -> Schedule:
        """Forward on batch i + 1 after the step on batch i, by ``sync``."""

        def task(name: str, fn: Callable[[TaskContext], Any], **fields: Any) -> Task:
            def run(ctx: TaskContext) -> None:
                self._pause()
                fn(ctx)
                self._pause()

            return Task.from_fn(name, run, **fields)

        return one_stage(
            task(
                "forward",
                lambda ctx: ctx.slots.set("loss", self.forward(ctx.slots["batch_cpu"])),
                lookahead=1,
                stream="ahead",
                reads=["batch_cpu"],
                writes=["loss"],
                **sync,
            ),
            task("zero_grad", lambda ctx: self.optimizer.zero_grad()),
            task(
                "backward",
                lambda ctx: ctx.slots["loss"].backward(),
                reads=["loss"],
                depends_on=["zero_grad"],
            ),
            task("step", self._step, depends_on=["backward"], writes=["step_result"]),
            streams=("default", "ahead"),
        )

    def _step(self, ctx: TaskContext) -> None:
        self.optimizer.step()
        ctx.slots.set("step_result", ctx.slots["loss"].detach())


def by_hand() -> tuple[list[Tensor], list[Tensor]]:
    """Losses and parameters of the loop written out: forward one batch ahead."""
    model, losses = Model(), []
    ahead = model.forward(BATCHES[0])
    for following in (*BATCHES[1:], None):
        model.optimizer.zero_grad()
        ahead.backward()
        model.optimizer.step()
        losses.append(ahead.detach())
        if following is not None:
            ahead = model.forward(following)
    return losses, [p.detach() for p in model.net.parameters()]


def random_delays() -> Callable[[], None]:
    """Of up to 2 ms, most of them none."""
    rng = random.Random(0)
    return lambda: time.sleep(rng.choice((0, 0, 0, 5e-4, 2e-3)))


PERIOD: dict[str, Any] = {"same_progress_sync": ["step"]}
BATCH: dict[str, Any] = {"cross_iter_depends_on": [("step", -1)]}


@pytest.mark.parametrize(
    ("sync", "executor"),
    [
        (PERIOD, None),
        (PERIOD, "threaded"),
        (PERIOD, ThreadedExecutor(lambda task: "ahead" if task.lookahead else "compute")),
        (BATCH, SequentialExecutor()),
        (BATCH, ThreadedExecutor("per_task")),
        (BATCH, ThreadedExecutor({"forward": "ahead", "step": "late"})),
    ],
)
def test_forward_ahead_gives_the_numbers_of_the_loop_by_hand(
    sync: dict[str, Any], executor: Any
) -> None:
    """The seed's section 3.7 (b) and (d): bit for bit, and N + 1 forwards after N calls."""
    losses, parameters = by_hand()
    model = Model(random_delays())
    with SchedulablePipeline(model.schedule(**sync), pool("ahead"), executor=executor) as pipe:
        batches = iter(BATCHES)
        for n, loss in enumerate(losses, start=1):
            assert torch.equal(pipe.progress(batches), loss)
            assert model.forwards == min(n + 1, len(BATCHES))
        with pytest.raises(StopIteration):
            pipe.progress(batches)
    assert all(map(torch.equal, parameters, model.net.parameters()))


def test_it_is_the_barrier_that_orders_what_lies_outside_slots() -> None:
    """Without it nothing keeps ``zero_grad`` behind the step on the batch before."""
    with SchedulablePipeline(
        Model().schedule(), pool("ahead"), executor=ThreadedExecutor("per_task")
    ) as pipe:
        plan = pipe.plan
    with_barrier, without = (
        HappensBefore.of(resolve_plan(replace(plan, within_calls=flag)), streams=False)
        for flag in (True, False)
    )
    assert with_barrier.host("step", "zero_grad", 1)
    assert not without.host("step", "zero_grad", 1)
