"""A system outside the package, in one file: tasks, a plan and a pipeline for a small model.

It uses documented public names of swpipe only. ``tests/test_installing.py`` runs it as a script
next to a clone, and ``.ci/wheel`` on the built wheel. It prints the number of steps that gave the
same numbers under the plan as serially.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from swpipe import DeclaredIO, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule, TypedContext
from swpipe.analysis import verify
from swpipe.distributed import batches_left
from swpipe.program import RETIRE
from swpipe.trace import Observer
from swpipe.values import map_tensors, modules_in, nbytes, tensors_in

STEPS = 6

Batch = dict[str, Any]


class RaggedContext(TypedContext):
    """The values of one iteration of this system."""

    moved: Batch
    loss: Tensor


class Tasks:
    """The three tasks of the system, over one model and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        state = [DeclaredIO(state="model", memory=[self.model, self.optimizer], others="")]
        self.tasks = [
            PipelineTask("move", self._move, pure=True),
            PipelineTask("forward", self._forward, io=state),
            PipelineTask("update", self._update, io=state),
        ]

    def _move(self, ctx: RaggedContext) -> None:
        ctx.moved = map_tensors(ctx.batch, lambda tensor: tensor.double().float())

    def _forward(self, ctx: RaggedContext) -> None:
        ctx.loss = sum(self.model(rows).square().mean() for rows in tensors_in(ctx.moved))

    def _update(self, ctx: RaggedContext) -> None:
        self.optimizer.zero_grad()
        ctx.loss.backward()
        self.optimizer.step()
        ctx.loss = ctx.loss.detach()


class Retired(Observer):
    """An observer that counts the iterations that were handed out."""

    count = 0

    def stop(self, ins: Any, iteration: int, exists: bool = True) -> None:
        """Count the end of an iteration."""
        self.count += ins.task == RETIRE


def plan() -> PipelinePlan:
    """Return the plan of the system: batches are moved one step ahead, on a thread."""
    return PipelinePlan(
        schedule={
            "move": TaskSchedule(stage=0, thread_group="io"),
            "forward": TaskSchedule(stage=1),
            "update": TaskSchedule(stage=1),
        },
        deps=[("forward", "move"), ("update", "forward")],
        cross_iter_deps=[("forward", "update")],
    )


def batches() -> Iterator[Batch]:
    """Return the batches, each with a ragged list of rows."""
    generator = torch.Generator().manual_seed(1)
    return iter(
        [
            {"rows": [torch.randn(n + 1, 4, generator=generator) for n in range(2)]}
            for _ in range(STEPS)
        ]
    )


def train(*, serially: bool) -> list[Tensor]:
    """Return the losses of all steps, and the parameters afterwards."""
    system = Tasks()
    assert sum(bytes_ for p in system.model.parameters() for bytes_ in nbytes(p).values()) == 196
    assert len([*modules_in(system.model)]) == 4
    verify(plan(), system.tasks, loader=[*batches()], body=False)
    assert batches_left(batches()) == STEPS
    retired = Retired()
    with SWPipeline(plan(), system.tasks, context=RaggedContext, device="cpu") as pipe:
        with pipe.observe(retired):
            if serially:
                contexts = [pipe.run_one_serial_iter(batch) for batch in batches()]
            else:
                contexts = [*pipe.iterate([*batches()])]
    assert retired.count == (0 if serially else STEPS)
    return [*(ctx.loss for ctx in contexts), *system.model.parameters()]


def main() -> None:
    """Train serially and under the plan, and compare bits."""
    pairs = zip(train(serially=True), train(serially=False), strict=True)
    assert all(torch.equal(plain, piped) for plain, piped in pairs)
    print(f"{STEPS} steps of a system outside the package: the same numbers")


if __name__ == "__main__":
    main()
