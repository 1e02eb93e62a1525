"""Exposed times against real removal of each task, on real work, with and without a busy core.

A step decompresses a batch, parses it in Python, sleeps, multiplies matrices, and trains an
embedding bag and an MLP with SGD. To remove a task is to leave what it computed before, and zeros
for the gradients that it would have had a part in.

In turns with the profiles, the step is timed with each task and without it, in as many visits as
all profiles have together. Their mean is the truth. A row says how many of the 95% intervals
contain it, how wide these are, and the greatest bias over the tasks: the mean error of all
profiles. The bias should be within 2% of the step, beyond what its own noise explains.

``python -m bench exposed`` measures few profiles of each; more with EXPOSED_PROFILES=20.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median, stdev

import torch
from torch import Tensor, nn

from bench.measure import Row, Spread
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskProfiler, TaskSchedule

BATCH, IDS, WIDTH, TABLE = 512, 16, 32, 4000
NAMES = ("read", "parse", "wait", "product", "embed", "forward", "backward", "step")
BIAS_BAR = 0.02
LEAST_COVERAGE = 0.91
SETTLE, TIMED = 6, 3
"""Iterations before and in each visit of the truth."""

BURN = """
import time
while True:
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end:
        pass
    time.sleep(0.01)
"""
"""A process that takes half of a core."""


class Removed(torch.autograd.Function):
    """A function with a loss that was computed earlier, and zero gradients for its inputs."""

    @staticmethod
    def forward(ctx: object, loss: Tensor, zeros: Tensor, upstream: Tensor) -> Tensor:
        ctx.zeros = zeros  # type: ignore[attr-defined]
        return loss.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.zeros  # type: ignore[attr-defined]


class Job:
    """A training step of about 8 ms from which any task can be removed."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(TABLE, (BATCH, IDS), generator=generator)
        dense = torch.randn(BATCH, WIDTH, generator=generator)
        self.sizes = ids.numel() * 8, dense.numel() * 4
        self.packed = zlib.compress((ids.numpy().tobytes() + dense.numpy().tobytes()) * 3)
        self.square = torch.randn(220, 220, generator=generator)
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(TABLE, WIDTH, mode="sum")
        self.mlp = nn.Sequential(
            nn.Linear(2 * WIDTH, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)
        )
        self.optimizer = torch.optim.SGD([*self.table.parameters(), *self.mlp.parameters()], 1e-3)
        self.removed: tuple[str, ...] = ()
        self.kept = IterContext(None, 0)
        for name in NAMES:
            getattr(self, name)(self.kept)
        self.kept.embedded, self.kept.loss = self.kept.embedded.detach(), self.kept.loss.detach()
        self.zeros = {p: torch.zeros_like(p) for p in (*self.mlp.parameters(), self.table.weight)}
        self.no_gradient = torch.zeros(BATCH, WIDTH)

    @property
    def tasks(self) -> list[PipelineTask]:
        """The tasks; those in ``removed`` only provide what they computed earlier."""
        return [PipelineTask(name, self._either(name)) for name in NAMES]

    def _either(self, name: str) -> Callable[[IterContext], None]:
        real: Callable[[IterContext], None] = getattr(self, name)
        free: Callable[[IterContext], None] = getattr(self, f"no_{name}")
        return lambda ctx: (free if name in self.removed else real)(ctx)

    def read(self, ctx: IterContext) -> None:
        ctx.raw = zlib.decompress(self.packed)

    def no_read(self, ctx: IterContext) -> None:
        ctx.raw = self.kept.raw

    def parse(self, ctx: IterContext) -> None:
        first, second = self.sizes
        ctx.ids = torch.frombuffer(bytearray(ctx.raw[:first]), dtype=torch.int64).view(BATCH, IDS)
        floats = torch.frombuffer(bytearray(ctx.raw[first : first + second]), dtype=torch.float32)
        ctx.dense = floats.view(BATCH, WIDTH)
        ctx.total = sum(i * i for i in range(12_000))

    def no_parse(self, ctx: IterContext) -> None:
        ctx.ids, ctx.dense, ctx.total = self.kept.ids, self.kept.dense, self.kept.total

    def wait(self, ctx: IterContext) -> None:
        time.sleep(1e-3)

    def no_wait(self, ctx: IterContext) -> None:
        """Do nothing."""

    def product(self, ctx: IterContext) -> None:
        ctx.product = self.square @ self.square @ self.square

    def no_product(self, ctx: IterContext) -> None:
        ctx.product = self.kept.product

    def embed(self, ctx: IterContext) -> None:
        ctx.embedded = self.table(ctx.ids)

    def no_embed(self, ctx: IterContext) -> None:
        # The backward of all other tasks computes the gradient of this output, as it always does.
        ctx.embedded = self.kept.embedded.detach().requires_grad_()
        self._no_gradients(self.table)

    def forward(self, ctx: IterContext) -> None:
        ctx.loss = self.mlp(torch.cat((ctx.embedded, ctx.dense), 1)).square().mean()

    def no_forward(self, ctx: IterContext) -> None:
        ctx.loss = Removed.apply(self.kept.loss, self.no_gradient, ctx.embedded)
        self._no_gradients(self.mlp)

    def backward(self, ctx: IterContext) -> None:
        ctx.loss.backward()

    def no_backward(self, ctx: IterContext) -> None:
        self._no_gradients(self.table)
        self._no_gradients(self.mlp)

    def step(self, ctx: IterContext) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def no_step(self, ctx: IterContext) -> None:
        """Do nothing; gradients accumulate, as they do when the task is shortcut."""

    def _no_gradients(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.grad = self.zeros[parameter]


def _plan(groups: dict[str, str], depth: int | None = None) -> PipelinePlan:
    """Return a plan of one stage per entry: a thread group, and the names of its tasks."""
    placed = [
        (name, TaskSchedule(stage=stage, thread_group=group))
        for stage, (group, names) in enumerate(groups.items())
        for name in names.split()
    ]
    names = [name for name, _ in placed]
    deps = list(zip(names[1:], names, strict=False))
    return PipelinePlan(dict(placed), deps=deps, pipeline_depth=depth)


TRAIN = "embed forward backward step"
PLANS = {
    "serially": PipelinePlan.serial(NAMES),
    "one thread ahead": _plan({"io": "read parse wait", "default": f"product {TRAIN}"}),
    "two threads ahead": _plan({"io": "read", "host": "parse wait product", "default": TRAIN}),
    "deep": _plan({"io": "read parse", "default": f"wait product {TRAIN}"}, depth=4),
}


@dataclass
class Found:
    """The measurements under one plan, in seconds.

    Attributes:
        profiles: Task to the estimate and half-width of each profile.
        true_s: Task to the differences that are the truth in the mean.
        step_s: The step with all tasks.
    """

    profiles: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    true_s: dict[str, list[float]] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)

    @property
    def coverage(self) -> float:
        """The share of intervals that contain the true time, whose own 95% interval counts."""
        hits = []
        for name, profiles in self.profiles.items():
            true_s = self.true_s[name]
            noise_s = 2 * stdev(true_s) / math.sqrt(len(true_s))
            hits += [
                abs(value_s - fmean(true_s)) <= math.hypot(half_s, noise_s)
                for value_s, half_s in profiles
            ]
        return fmean(hits)

    @property
    def half_width_s(self) -> float:
        """The median half-width over tasks and profiles."""
        return median(half for found in self.profiles.values() for _, half in found)

    def bias_s(self, name: str) -> tuple[float, float]:
        """Return the mean error of a task's profiles, and the standard error of that mean."""
        values, truth = [value for value, _ in self.profiles[name]], self.true_s[name]
        noise = math.hypot(
            stdev(values) / math.sqrt(len(values)), stdev(truth) / math.sqrt(len(truth))
        )
        return fmean(values) - fmean(truth), noise


def true_round(job: Job, pipe: SWPipeline, *, pipelined: bool, rng: random.Random) -> Found:
    """Time the step with all tasks and without each of them, in alternation."""

    def visit(removed: tuple[str, ...]) -> float:
        job.removed = removed
        for _ in range(SETTLE):
            once()
        begin = time.perf_counter()
        for _ in range(TIMED):
            once()
        return (time.perf_counter() - begin) / TIMED

    feed = iter(lambda: 0, 1)
    once = (lambda: pipe.progress(feed)) if pipelined else (lambda: pipe.run_one_serial_iter(0))
    found = Found()
    before = visit(())
    for name in rng.sample(NAMES, len(NAMES)):
        without = visit((name,))
        after = visit(())
        found.true_s[name] = [(before + after) / 2 - without]
        found.step_s.append(after)
        before = after
    if pipelined:
        pipe.drain()
    job.removed = ()
    return found


def measure(plan: PipelinePlan, *, pipelined: bool, profiles: int, rounds: int = 6) -> Found:
    """Take profiles and measure the true times, in alternation."""
    job, rng, total = Job(), random.Random(0), Found()
    with SWPipeline(plan, job.tasks, device="cpu") as pipe:
        for _ in range(profiles):
            state = [job.table, job.mlp, job.optimizer]
            result = TaskProfiler(pipe, state=state).profile(0, pipelined=pipelined)
            for name in NAMES:
                if exposed := result.exposed(name):
                    both = (exposed.value_s, exposed.spread_s)
                    total.profiles.setdefault(name, []).append(both)
            for _ in range(rounds):
                found = true_round(job, pipe, pipelined=pipelined, rng=rng)
                total.step_s += found.step_s
                for name in NAMES:
                    total.true_s.setdefault(name, []).extend(found.true_s[name])
    return total


@contextmanager
def half_a_core(taken: bool) -> Iterator[None]:
    """Occupy half of a core by another process within the block."""
    if not taken:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def rows_of(what: str, found: Found) -> list[Row]:
    """Return two rows: the coverage with the intervals' width, and the largest bias."""
    step_s = fmean(found.step_s)
    count = sum(map(len, found.profiles.values()))
    biases = {name: found.bias_s(name) for name in NAMES}
    beyond = {name: max(0.0, abs(bias) - 2 * noise) for name, (bias, noise) in biases.items()}
    worst = max(beyond, key=lambda name: (beyond[name], abs(biases[name][0])))
    bias, noise = biases[worst]
    return [
        Row(
            what=f"{what}: intervals with the truth in them",
            ours=f"{100 * found.coverage:.1f}% of {count}, +/- {1e3 * found.half_width_s:.2f} ms",
            beside=f"of a step of {1e3 * step_s:.2f} ms",
            ratio=Spread.of([LEAST_COVERAGE / found.coverage]),
            bar=1.0,
        ),
        Row(
            what=f"{what}: greatest bias, beyond twice its noise",
            ours=f"{1e3 * bias:+.3f} +/- {1e3 * noise:.3f} ms, {worst}",
            beside="over the step",
            ratio=Spread.of([beyond[worst] / step_s]),
            bar=BIAS_BAR,
        ),
    ]


def rows() -> list[Row]:
    """Return the rows of a serial and three pipelined plans, on a quiet machine and a busy one."""
    profiles = int(os.environ.get("EXPOSED_PROFILES", "3"))
    found: list[Row] = []
    for taken in (False, True):
        for name, plan in PLANS.items():
            with half_a_core(taken):
                result = measure(plan, pipelined=name != "serially", profiles=profiles)
            found += rows_of(f"{name}{', half a core taken' * taken}", result)
    return found
