"""Training jobs that can be stopped at any iteration: eight loops, and plans for their tasks.

As a script, ``python -m tests.loops.resumable_jobs LOOP PLAN CHECKPOINT``, it goes on from the
checkpoint if there is one, writes a new one after each iteration, and prints its number and loss.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, RandomSampler

import swpipe
from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.plans import prefetch_plan
from tests.loops.ordinary_loops import NoisyRows, Rows, batches
from tests.support.plans_for_tests import NOBODY_ELSE

EPOCHS = 3


class StatefulRows:
    """A loader that knows where it is, and shuffles by numbers of its own."""

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
    """A loader's own."""
    return torch.Generator().manual_seed(5)


def torchdata(rows: Any = None, **options: Any) -> Any:
    """Shuffled batches of a loader with a state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(rows or Rows(), **{"batch_size": 4, "shuffle": True, **options})


class Training:
    """Model, optimizer and what else a loop trains; its tasks, and its checkpoint."""

    loader: Any
    network = staticmethod(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))
    random_forward = False

    def __init__(self) -> None:
        self.loader = self.make_loader()
        self.model: nn.Module = self.network()
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), 0.01)
        self.scheduler = StepLR(self.optimizer, 5, 0.7)

    def make_loader(self) -> Any:
        return batches(shuffle=True)

    def decode(self, ctx: Any) -> None:
        ctx.x = ctx.batch * 2

    def noise(self, ctx: Any) -> None:
        ctx.x = ctx.x + 0.1 * torch.rand(4)

    def forward(self, ctx: Any) -> None:
        ctx.loss = (self.model(ctx.x) - ctx.x.sum(1, keepdim=True)).square().mean()

    def backward(self, ctx: Any) -> None:
        self.optimizer.zero_grad()
        ctx.loss.backward()

    def step(self, ctx: Any) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def body(self, ctx: Any) -> None:
        """After the tasks."""

    def tasks(self) -> list[PipelineTask]:
        return [
            PipelineTask("decode", self.decode, pure=True),
            PipelineTask("noise", self.noise, io=[NOBODY_ELSE], random=True, pure=True),
            PipelineTask("forward", self.forward, random=self.random_forward),
            PipelineTask("backward", self.backward),
            PipelineTask("step", self.step),
        ]

    def save(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])


class Dropout(Training):
    """Shuffled batches, and a model that draws."""

    network = staticmethod(lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 1)))
    random_forward = True


class Augmented(Training):
    """The loader draws as it reads, and a batch norm counts."""

    network = staticmethod(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    )

    def make_loader(self) -> Any:
        return batches(NoisyRows(), shuffle=True, drop_last=True)


class Accumulating(Training):
    """Three batches a step, a scheduler, and counters of its own."""

    steps = rows = 0

    def backward(self, ctx: Any) -> None:
        (ctx.loss / 3).backward()

    def step(self, ctx: Any) -> None:
        self.rows += len(ctx.x)
        if (ctx.iter_idx + 1) % 3 == 0:
            super().step(ctx)
            self.optimizer.zero_grad()
            self.steps += 1

    def body(self, ctx: Any) -> None:
        ctx.loss = ctx.loss.detach() + self.steps + self.rows

    def save(self) -> dict[str, Any]:
        gradients = [one.grad for one in self.model.parameters()]
        return {**super().save(), "gradients": gradients, "counters": (self.steps, self.rows)}

    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved)
        self.steps, self.rows = saved["counters"]
        for parameter, gradient in zip(self.model.parameters(), saved["gradients"], strict=True):
            parameter.grad = gradient


class TorchData(Dropout):
    """A loader of torchdata, whose dataset draws."""

    def make_loader(self) -> Any:
        return torchdata(NoisyRows())


class Given(Dropout):
    """A loader that shuffles by a generator that it was given."""

    def make_loader(self) -> Any:
        return batches(shuffle=True, generator=with_generator())


class TorchDataGiven(Dropout):
    """The same of a loader of torchdata."""

    def make_loader(self) -> Any:
        return torchdata(generator=with_generator())


class TorchDataBatches(Dropout):
    """The same of a batch sampler of torch's, which torchdata's state does not have."""

    def make_loader(self) -> Any:
        shuffled = RandomSampler(Rows(), generator=with_generator())
        options = {"batch_size": 1, "batch_sampler": BatchSampler(shuffled, 4, drop_last=False)}
        return torchdata(shuffle=None, **options)


class Averaged(Training):
    """A loader with a state of the user's own, an average of the model, and an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.model)

    def make_loader(self) -> Any:
        return StatefulRows()

    def body(self, ctx: Any) -> None:
        self.average.update_parameters(self.model)
        if ctx.iter_idx % 4 == 3:
            with torch.no_grad():
                # Not by a DataLoader: it would draw a seed while "noise" may be drawing ahead.
                parts = [self.average(rows).sum() for rows in Rows().rows.split(8)]
            ctx.loss = ctx.loss.detach() + torch.stack(parts).sum()

    def save(self) -> dict[str, Any]:
        return {**super().save(), "average": self.average.state_dict()}

    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved)
        self.average.load_state_dict(saved["average"])


LOOPS: dict[str, Callable[[], Training]] = {
    "dropout": Dropout,
    "augmented": Augmented,
    "accumulating": Accumulating,
    "torchdata": TorchData,
    "averaged": Averaged,
    "given": Given,
    "torchdata, given": TorchDataGiven,
    "torchdata, batches": TorchDataBatches,
}


def two_workers(names: list[str]) -> PipelinePlan:
    """A thread each for the loader, the first task and the second, up to four iterations ahead."""
    first, second, *rest = names
    deps = [(after, before) for before, after in pairwise(names)]
    return PipelinePlan(
        schedule={
            first: TaskSchedule(stage=0, thread_group="io"),
            second: TaskSchedule(stage=1, thread_group="features"),
            **{name: TaskSchedule(stage=3) for name in rest},
        },
        deps=deps,
        pull_group="loader",
    )


PLANS: dict[str, Callable[[list[str]], PipelinePlan]] = {
    "serial": lambda names: PipelinePlan.serial(names),
    "prefetched": lambda names: prefetch_plan(names[:2], names[2:]),
    "two workers": two_workers,
}


class Job:
    """Everything of one process that trains."""

    def __init__(self, loop: str, plan: str, seed: int = 7) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.parts = LOOPS[loop]()
        tasks = self.parts.tasks()
        names = [task.name for task in tasks]
        self.pipe = SWPipeline(PLANS[plan](names), tasks, device="cpu")
        self.loop = swpipe.loops.ResumableLoop(self.pipe, self.parts.loader)
        self.epoch = 0

    def losses(self) -> Iterator[float]:
        """Train; a loss after each iteration, when a checkpoint may be saved."""
        for self.epoch in range(self.epoch, EPOCHS):  # noqa: B020
            for ctx in self.loop:
                self.parts.body(ctx)
                yield ctx.loss.item()

    def save(self, file: Any) -> None:
        """Write a checkpoint."""
        state = {**self.parts.save(), "loop": self.loop.state_dict(), "epoch": self.epoch}
        torch.save(state, file)

    def load(self, file: Any) -> None:
        """Go on from a checkpoint."""
        saved = torch.load(file, weights_only=True)
        self.parts.load(saved)
        self.loop.load_state_dict(saved["loop"])
        self.epoch = saved["epoch"]


def main(loop: str, plan: str, checkpoint: str) -> None:
    """Train to the end; a checkpoint after each iteration."""
    job = Job(loop, plan)
    if Path(checkpoint).exists():
        job.load(checkpoint)
    with job.pipe:
        for loss in job.losses():
            job.save(f"{checkpoint}.new")
            Path(f"{checkpoint}.new").replace(checkpoint)
            print(job.pipe.state_dict()["next_iteration"] - 1, loss.hex(), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
