"""Memory that is on the host between two uses: the same numbers, less memory, the same time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from swpipe import DeclaredIO, IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.analysis import verify
from swpipe.core.costs import CostModel, TaskCost
from swpipe.device.offload import Offload, offloaded, with_offload
from swpipe.errors import PlanError
from swpipe.planning import simulate
from swpipe.profiler import measure_memory
from swpipe.tuning import choose_offload
from tests import backend
from tests.device.accelerator.work import DEVICE, SIMULATED, spin
from tests.support.offload_layers import Layers, kept_bytes

accelerator = torch.accelerator
MIB = 2**20
COUNT = 8
ALL = range(COUNT - 1)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Overwrite freed memory, if the device can do that."""
    if not SIMULATED:
        yield
        return
    with backend.misbehaving(poison=True, late_streams=300.0, link_us_per_mib=3000.0):
        yield


@pytest.fixture
def layers() -> Layers:
    """Return a stack of layers."""
    return Layers(COUNT, DEVICE, lambda ms: spin(ms / 20))


def peak_mib(layers: Layers, which: range) -> float:
    """Return the peak memory of a run, without parameters and their gradients."""
    with layers.pipeline(which) as pipe:
        pipe.run([layers.batch] * 2)
        gc.collect()
        accelerator.synchronize()
        accelerator.empty_cache()
        accelerator.reset_peak_memory_stats()
        before: int = accelerator.memory_allocated()
        pipe.run([layers.batch] * 4)
        accelerator.synchronize()
    most: int = accelerator.memory_stats()["active_bytes.all.peak"]
    return (most - before) / MIB


@pytest.mark.usefixtures("poisoned", "deterministic")
def test_gradients_are_equal_bit_for_bit(layers: Layers) -> None:
    """They are equal over several iterations, with late streams and freed memory overwritten."""
    wanted = layers.gradients([], steps=3)
    for which in (ALL, [0], [0, 3], [2, 5]):
        assert all(map(torch.equal, layers.gradients(which, steps=3), wanted))


def test_a_third_of_the_activations_stays_on_the_device(layers: Layers) -> None:
    """Three layers have memory there: the one that runs, and two that are being copied."""
    assert kept_bytes(layers, ALL) <= kept_bytes(layers, []) / 3


@pytest.mark.skipif(not SIMULATED, reason="blocks of other sizes on other allocators")
def test_the_peak_is_as_predicted_however_far_the_host_is_ahead(layers: Layers) -> None:
    """The allocator shows it: memory is freed and allocated in the order of one stream."""
    found = {}
    for which in (range(0), ALL):
        tasks, pairs = layers.tasks(), layers.pairs(which)
        of_pairs = offloaded(tasks, pairs)
        memory = measure_memory(of_pairs, [layers.batch], device=DEVICE, state=layers.weights)
        costs = CostModel({task.name: TaskCost(1.0) for task in of_pairs}, memory=memory)
        plan = with_offload(PipelinePlan.serial(tasks), pairs)
        predicted = simulate(plan, costs, streams=True).memory
        assert predicted is not None
        found[len(which)] = peak_mib(layers, which)
        # The batch of the host is in the prediction, and not on the device.
        assert predicted.bytes / MIB - 1 == pytest.approx(found[len(which)], rel=0.15)
    assert found[len(ALL)] <= 0.65 * found[0]


def test_as_few_pairs_are_taken_as_max_bytes_needs(layers: Layers) -> None:
    """No pair is used if there is room; if there is not enough, the message says what is needed."""
    tasks, pairs = layers.tasks(), layers.pairs(ALL)

    def chosen(max_bytes: int) -> Any:
        plan = PipelinePlan.serial(tasks)
        return choose_offload(
            tasks, plan, pairs, [layers.batch], max_bytes=max_bytes, device=DEVICE,
            state=layers.weights,
        )  # fmt: skip

    assert chosen(64 * MIB).pairs == ()
    least = chosen(9 * MIB)
    assert 0 < len(least.pairs) < len(pairs)
    assert least.peak_bytes <= 9 * MIB
    with SWPipeline(least.plan, least.tasks, device=str(DEVICE)) as pipe:
        pipe.run([layers.batch])
    with pytest.raises(PlanError, match="all 7 pairs together hold .* max_bytes"):
        chosen(3 * MIB)


def test_a_tensor_that_is_modified_before_its_copy_is_refused() -> None:
    """Torch refuses it in the same way if it stays on the device."""

    def forward(ctx: IterContext) -> None:
        x = torch.rand(2**16, device=DEVICE, requires_grad=True)
        y = x.exp()
        ctx.loss = y.sum()
        y.add_(1)

    def between(ctx: IterContext) -> None:
        pass

    def backward(ctx: IterContext) -> None:
        ctx.loss.backward()

    tasks = [PipelineTask(f.__name__, f) for f in (forward, between, backward)]
    pair = Offload("y", "forward", "backward", DEVICE)
    plan = with_offload(PipelinePlan.serial(tasks), [pair])
    with (
        SWPipeline(plan, offloaded(tasks, [pair]), device=str(DEVICE)) as pipe,
        pytest.raises(RuntimeError, match="modified in place"),
    ):
        pipe.run([0])


@pytest.mark.usefixtures("poisoned")
def test_memory_goes_after_its_copy_and_comes_after_earlier_work() -> None:
    """The streams wait under any plan: here the host is far ahead of the device."""
    seen: dict[int, Tensor] = {}
    gradients: list[Tensor] = []

    def forward(ctx: IterContext) -> None:
        source = torch.full((2**18,), 2.0, device=DEVICE, requires_grad=True)
        ctx.saved = Saved(source, source.exp().sum())

    def work(ctx: IterContext) -> None:
        scratch = torch.full((2**18,), 1.0 + ctx.iter_idx, device=DEVICE)
        spin(20.0)
        seen[ctx.iter_idx] = scratch.clone()

    def after_it(ctx: IterContext) -> None:
        pass

    def backward(ctx: IterContext) -> None:
        gradients.extend(torch.autograd.grad(ctx.saved.loss, [ctx.saved.source]))

    tasks = [PipelineTask(f.__name__, f) for f in (forward, work, after_it, backward)]
    pair = Offload("exp", "forward", "backward", DEVICE, freed="work")
    plan = with_offload(PipelinePlan.serial(tasks), [pair])
    edges = {("restore exp", "work"), ("work", "stash exp")}
    plan = replace(plan, deps=[dep for dep in plan.deps if dep not in edges])
    with SWPipeline(plan, device=str(DEVICE), check_effects=False) as pipe:
        pipe.run(range(3))
    for number, values in seen.items():
        assert values.cpu().unique().tolist() == [1.0 + number]
    assert {value for one in gradients for value in one.cpu().tolist()} == {
        torch.tensor(2.0).exp().item()
    }


class Saved:
    """A leaf and a loss computed from it, outside the context."""

    def __init__(self, source: Tensor, loss: Tensor) -> None:
        self.source, self.loss = source, loss


class Moments:
    """A step whose state outlives iterations, with work that could reuse its memory."""

    def __init__(self, *, fails: bool = False) -> None:
        self.weight = torch.ones(2**18, device=DEVICE)
        self.moment = torch.zeros(2**18, device=DEVICE)
        self.fails = fails
        self.seen: list[int] = []
        io = [DeclaredIO(state="moments", memory=self.moment)]
        self.tasks = [
            PipelineTask("first", lambda ctx: None),
            PipelineTask("work", self._work),
            PipelineTask("backward", self._backward),
            PipelineTask("step", self._step, io),
        ]
        self.pair = Offload(
            "moments", "first", "step", DEVICE, tensors=lambda: [self.moment], freed="work",
            state="moments",
        )  # fmt: skip

    def pipeline(self, *, offload: bool = True) -> SWPipeline[Any]:
        pairs = [self.pair] if offload else []
        plan = with_offload(PipelinePlan.serial(self.tasks), pairs)
        return SWPipeline(plan, offloaded(self.tasks, pairs), device=str(DEVICE))

    def _work(self, ctx: IterContext) -> None:
        self.seen.append(self.moment.untyped_storage().nbytes())
        if self.fails:
            raise ArithmeticError("failed")
        ctx.big = torch.full((2**18,), float(ctx.iter_idx), device=DEVICE)

    def _backward(self, ctx: IterContext) -> None:
        ctx.gradient = ctx.big + self.weight

    def _step(self, ctx: IterContext) -> None:
        self.moment.mul_(0.5).add_(ctx.gradient)
        self.weight.sub_(self.moment, alpha=0.1)

    def values(self) -> list[Tensor]:
        accelerator.synchronize()
        return [self.weight.cpu(), self.moment.cpu()]


@pytest.mark.usefixtures("poisoned")
def test_state_that_outlives_iterations_is_away_in_between_and_there_at_their_end() -> None:
    """Its memory is empty during the work; the loop's body finds it complete."""
    found = []
    for offload in (False, True):
        moments = Moments()
        with moments.pipeline(offload=offload) as pipe:
            for _ in pipe.iterate(range(4)):
                assert moments.moment.untyped_storage().nbytes() == MIB
            found.append(moments.values())
        assert set(moments.seen) == {0 if offload else MIB}
    assert all(map(torch.equal, *found))


def test_a_failure_brings_state_back() -> None:
    """A later checkpoint would otherwise read memory that does not exist."""
    moments = Moments()
    with moments.pipeline() as pipe:
        pipe.run(range(2))
        wanted = moments.values()
        moments.fails = True
        with pytest.raises(ArithmeticError):
            pipe.run(range(1))
    assert moments.moment.untyped_storage().nbytes() == MIB
    assert all(map(torch.equal, moments.values(), wanted))


def test_a_plan_that_lets_the_user_run_before_the_restore_is_refused() -> None:
    """Both errors name the state; a pair between whose tasks nothing runs is refused, too."""
    moments = Moments()
    tasks = offloaded(moments.tasks, [moments.pair])
    plan = with_offload(PipelinePlan.serial(moments.tasks), [moments.pair])
    assert verify(plan, tasks, pull_ahead=True, body=False).orders > 0
    edge = ("step", "restore moments")
    without = replace(plan, deps=[dep for dep in plan.deps if dep != edge])
    with pytest.raises(PlanError, match=r'add deps=\[\("step", "restore moments"\)\]'):
        verify(without, tasks, pull_ahead=True, body=False)
    close = Offload("close", "work", "backward", DEVICE)
    with pytest.raises(PlanError, match="no task runs between 'work' and 'backward'"):
        with_offload(PipelinePlan.serial(moments.tasks), [close])
