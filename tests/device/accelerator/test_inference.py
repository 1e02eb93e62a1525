"""Recording on an accelerator: the CPU's dependences, enough for any streams; state restored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.analysis import verify
from swpipe.errors import PlanError
from swpipe.inference import Recording, record
from tests import backend
from tests.device.accelerator.work import DEVICE, SIMULATED, spin
from tests.inference.helpers import WORD
from tests.support.plans_for_tests import NOBODY_ELSE, scattered

ITERATIONS = 10


class Training:
    """A model in training, whose tasks declare a word; each submits some work before and after."""

    def __init__(self, device: torch.device | str, delays: random.Random | None = None) -> None:
        self.device, self.delays = torch.device(device), delays
        draw = torch.Generator().manual_seed(5)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
        self.model.to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.steps = torch.zeros((), dtype=torch.int32, device=self.device)
        self.total = torch.zeros((), device=self.device)

    def copy(self, ctx: IterContext) -> None:
        ctx.x = ctx.batch.to(self.device, non_blocking=True)

    def noise(self, ctx: IterContext) -> None:
        ctx.noisy = ctx.x + 0.1 * torch.randn_like(ctx.x)
        del ctx.x

    def forward(self, ctx: IterContext) -> None:
        ctx.loss = self.model(ctx.noisy).square().mean()

    def backward(self, ctx: IterContext) -> None:
        self.optimizer.zero_grad()
        ctx.loss.backward()

    def step(self, ctx: IterContext) -> None:
        self.optimizer.step()

    def count(self, ctx: IterContext) -> None:
        self.steps.add_(1)

    def report(self, ctx: IterContext) -> None:
        self.total.mul_(0.9).add_(ctx.loss.detach())
        ctx.mean = self.total / self.steps

    def tasks(self) -> list[PipelineTask]:
        """In serial order."""
        fns = (self.copy, self.noise, self.forward, self.backward, self.step, self.count)
        return [self._task(fn) for fn in (*fns, self.report)]

    def _task(self, fn: object) -> PipelineTask:
        name = fn.__name__  # type: ignore[attr-defined]
        io = [WORD, NOBODY_ELSE] if name == "noise" else [WORD]
        return PipelineTask(name, Delayed(fn, self.delays), io, random=name == "noise")

    def state(self) -> list[Tensor]:
        """All that training changes, on the host."""
        moments = [v for s in self.optimizer.state.values() for v in s.values() if v is not None]
        found = [*self.model.parameters(), *moments, self.steps, self.total]
        return [tensor.detach().cpu() for tensor in found]


class Delayed:
    """A task's function between work of random length."""

    def __init__(self, fn: object, delays: random.Random | None) -> None:
        self.fn, self._delays = fn, delays

    def __call__(self, ctx: IterContext) -> None:
        if self._delays is not None:
            spin(self._delays.uniform(0.0, 1.0))
        self.fn(ctx)  # type: ignore[operator]
        if self._delays is not None:
            spin(self._delays.uniform(0.0, 0.3))


def batches() -> list[Tensor]:
    """The same every time."""
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(4, 8, generator=draw) for _ in range(ITERATIONS)]


def recording_on(device: torch.device | str) -> Recording:
    """Of two iterations."""
    return record(Training(device).tasks(), batches()[0], device=device)


def trained(plan: PipelinePlan | None, seed: int = 0) -> list[Tensor]:
    """What training comes to under a plan, or serially."""
    training = Training(DEVICE, random.Random(seed))
    tasks = training.tasks()
    means: list[Tensor] = []
    plan = plan or PipelinePlan.serial(tasks)
    with SWPipeline(plan, tasks, device=DEVICE, seed=7, check_effects=False) as pipe:
        for ctx in pipe.iterate(batches()):
            means.append(ctx.mean)
            del ctx
        torch.accelerator.synchronize()
    return [*(mean.cpu() for mean in means), *training.state()]


@cache
def serially() -> list[Tensor]:
    """What the serial run comes to."""
    return trained(None)


def on_streams(plan: PipelinePlan, seed: int) -> PipelinePlan:
    """The same dependences; stages, threads and streams at random."""
    rng, plan = random.Random(seed), scattered(plan, seed)
    entries = {
        name: replace(entry, stream=rng.choice((None, "one", "two")))
        for name, entry in plan.schedule.items()
    }
    return replace(plan, schedule=entries)


@contextmanager
def badly() -> Iterator[None]:
    """The test backend with late streams, and with memory poisoned."""
    if not SIMULATED:
        yield
        return
    with backend.misbehaving(late_streams=100.0, poison=True):
        yield


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Of two iterations on the device."""
    return recording_on(DEVICE)


def test_the_device_needs_the_orders_that_the_cpu_needs(recording: Recording) -> None:
    """Parameters, gradients, momentum and counters are found wherever they are."""
    found = {one[:3] for one in recording.dependences().needed}
    assert found == {one[:3] for one in recording_on("cpu").dependences().needed}
    assert {("forward", "step", 1), ("report", "count", 0), ("count", "report", 1)} <= found


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("seed", range(6))
def test_inferred_orders_are_enough_on_any_streams(recording: Recording, seed: int) -> None:
    """Random stages, threads and streams give the serial run's bits."""
    serial = serially()
    with badly():
        piped = trained(on_streams(recording.plan(), seed), seed)
    assert len(piped) == len(serial)
    assert all(map(torch.equal, piped, serial))


@pytest.mark.usefixtures("deterministic")
def test_without_the_inferred_orders_they_are_not(recording: Recording) -> None:
    """Without the order of a counter's readers and its next writer, some plan differs."""
    found = recording.plan()
    kept = [one for one in found.cross_iter_deps if one[0] != "count"]
    assert len(kept) < len(found.cross_iter_deps)
    bare = replace(found, cross_iter_deps=kept)
    serial = serially()

    def differs(seed: int) -> bool:
        return not all(map(torch.equal, trained(on_streams(bare, seed), seed), serial))

    assert any(differs(seed) for seed in range(6))


def test_recording_leaves_no_trace_on_the_device() -> None:
    """State and generators are as they were."""
    training = Training(DEVICE)
    before = [torch.get_rng_state(), *training.state()]  # no momentum yet
    generator = torch.get_device_module(DEVICE.type).get_rng_state()
    record(training.tasks(), batches()[0], device=DEVICE)
    after = [torch.get_rng_state(), *training.state()]
    assert len(after) == len(before)
    assert all(map(torch.equal, before, after))
    assert torch.equal(generator, torch.get_device_module(DEVICE.type).get_rng_state())


def is_stopped(plan: PipelinePlan, seed: int) -> bool:
    """Whether a run that is checked is stopped."""
    tasks = Training(DEVICE, random.Random(seed)).tasks()
    with SWPipeline(plan, tasks, device=DEVICE, check_effects=True) as pipe:
        try:
            pipe.run(batches())
        except PlanError:
            return True
    return False


@pytest.mark.parametrize("seed", range(4))
def test_a_check_of_effects_knows_the_order_of_streams(recording: Recording, seed: int) -> None:
    """It stops a run exactly if some stream may do the work of two tasks out of order."""
    found = recording.plan()
    assert not is_stopped(on_streams(found, seed), seed)
    kept = [one for one in found.cross_iter_deps if one[0] != "count"]
    bare = on_streams(replace(found, cross_iter_deps=kept), seed)
    try:
        verify(bare, recording.tasks, recording.effects, streams=True, pull_ahead=True)
    except PlanError:
        assert is_stopped(bare, seed)
    else:
        assert not is_stopped(bare, seed)
