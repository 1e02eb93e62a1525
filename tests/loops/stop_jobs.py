"""Jobs that SIGTERM stops at random moments, on each of several ranks, and that go on."""

from __future__ import annotations

import io
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import swpipe
from swpipe import PipelineTask, SWPipeline
from swpipe.loops import StopRequest, stop_request
from swpipe.plans import prefetch_plan
from tests.loops.ordinary_loops import NoisyRows, Rows

EPOCHS, WAIT_S = 6, 2e-3


class Numbers(NamedTuple):
    """What a job computed: the loss of each iteration, in bits, and the parameters."""

    losses: dict[int, str]
    parameters: list[Any]


class Job:
    """Everything of one rank that trains; ``kind`` is a loop of ``LOOPS``."""

    def __init__(self, kind: str, seed: int) -> None:
        random.seed(seed + dist.get_rank())
        torch.manual_seed(seed + dist.get_rank())
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 1))
        if dist.get_world_size() > 1:
            self.model = DistributedDataParallel(self.model)
            # It sums the first gradients of a process in another order than all later ones.
            self.model(torch.zeros(1, 4)).sum().backward()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.loop = LOOPS[kind](self)
        self.epoch = 0

    def loader(self, rows: Rows, **options: Any) -> Any:
        self.sampler: Any = DistributedSampler(rows, seed=3)
        return DataLoader(rows, batch_size=1, sampler=self.sampler, **options)

    def decode(self, ctx: Any) -> None:
        threading.Event().wait(WAIT_S)
        ctx.x = ctx.batch * 2

    def train(self, ctx: Any) -> None:
        ctx.loss = (self.model(ctx.x) - ctx.x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        ctx.loss.backward()
        self.optimizer.step()

    def tasks(self, **options: Any) -> list[PipelineTask]:
        return [
            PipelineTask("decode", self.decode, pure=True),
            PipelineTask("train", self.train, **options),
        ]

    def run(self, stop: StopRequest) -> Numbers:
        """To the end, or to a stop."""
        losses = {}
        for self.epoch in range(self.epoch, EPOCHS):  # noqa: B020
            if self.epoch != self.sampler.epoch:
                self.sampler.set_epoch(self.epoch)
            for ctx in stop.watch(self.loop):
                losses[ctx.iter_idx] = ctx.loss.item().hex()
            if stop.requested:
                break
        return Numbers(losses, [p.detach().tolist() for p in self.model.parameters()])

    def save(self) -> bytes:
        parts = {"model": self.model, "optimizer": self.optimizer, "loop": self.loop}
        file = io.BytesIO()
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "epoch": self.epoch}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved))
        self.epoch = state["epoch"]
        self.sampler.set_epoch(self.epoch)
        for name in ("model", "optimizer", "loop"):
            getattr(self, name).load_state_dict(state[name])


def overlapped(job: Job) -> Any:
    """The rows are read in this process, ahead of the loop, and the model draws."""
    return swpipe.overlap(job.loader(Rows()), job.tasks(), pull_ahead=True, device="cpu")


def prefetched(job: Job) -> Any:
    """Under a plan with a task on a thread of its own; the rows are augmented."""
    tasks = job.tasks(random=True, io=[])
    plan = prefetch_plan(tasks[:1], tasks[1:])
    pipe = SWPipeline(plan, tasks, device="cpu", seed=5, check_ranks=False)
    return swpipe.loops.ResumableLoop(pipe, job.loader(NoisyRows()))


LOOPS: dict[str, Callable[[Job], Any]] = {"overlapped": overlapped, "prefetched": prefetched}


@contextmanager
def signal_after(seconds: float | None) -> Iterator[None]:
    """This process gets SIGTERM so much later, if the block has not ended by then."""
    timer = threading.Timer(seconds or 0, os.kill, (os.getpid(), signal.SIGTERM))
    if seconds is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if seconds is not None:
            timer.join()


def run(kind: str, seed: int, saved: bytes | None, after_s: float | None) -> Any:
    """One process of the job: its numbers, why it stopped, and what it saved then."""
    job = Job(kind, seed)
    if saved is not None:
        job.load(saved)
    with getattr(job.loop, "pipe", job.loop), StopRequest() as stop, signal_after(after_s):
        numbers = job.run(stop)
        return numbers, stop.reason, job.save() if stop.requested else None


class Stopped(NamedTuple):
    """How often a job was stopped, after which iterations, and whether that changed its numbers."""

    stops: int
    after: list[int]
    same: bool


def stop_at_random(kind: str, stops: int, most_s: float) -> Stopped:
    """A job without a stop; then so many stops, by a signal to one or all ranks, and more."""
    stop_request.LOOK_S = 0.01
    expected, _, _ = run(kind, 1, None, None)
    rng, own = random.Random(kind), random.Random(dist.get_rank())
    after, same = [], True
    while len(after) < stops:
        losses: dict[int, str] = {}
        saved, ended, seed = None, False, 1
        while not ended:
            asked = rng.choice([*range(dist.get_world_size()), None])
            moment_s = rng.random() * most_s
            if asked is None:
                moment_s += own.random() * 0.02  # not at the same time on all
            here = asked in (None, dist.get_rank())
            numbers, reason, saved = run(kind, seed, saved, moment_s if here else None)
            same = same and not (losses.keys() & numbers.losses.keys())
            losses |= numbers.losses
            seed += 1
            ended = not reason
            if reason:
                after.append(max(losses, default=-1))
        same = same and losses == expected.losses and numbers.parameters == expected.parameters
    return Stopped(len(after), after, same)
