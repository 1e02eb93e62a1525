"""Learning rates of fused tables: the look-up of each batch takes the one that TorchRec gives it.

The fused kernel takes the rate at the look-up. TorchRec's ``zero_grad`` hands it over, before the
forward; ours did so in the backward, so that every table was a step late, serially too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from swpipe import SWPipeline
from swpipe.errors import PlanError
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec import PipelineFactory, SparseDistTasks, TrainStep
from tests.support.pairs import pairwise_cases
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import CPU, Batch, Job, batches, everything, sharded
from tests.tasks.torchrec.trial import EXACT, Outcome, TrainPipelineBase, to_the_end

from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer  # isort: skip
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # isort: skip
from torchrec.optim.optimizers import in_backward_optimizer_filter  # isort: skip
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage  # isort: skip

STEPS = 8
STALE = "jagged_semi_sync_sparse_dist"


def dense(model: nn.Module) -> Any:
    """TorchRec's wrapper around SGD for all that is not fused."""
    named = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(named, lambda params: torch.optim.SGD(params, lr=0.1))


def combined(model: nn.Module) -> Any:
    """The tables' fused optimizer and the dense one, as TorchRec's examples have it."""
    return CombinedOptimizer([model.fused_optimizer, dense(model)])


def warmed_up(model: nn.Module) -> Any:
    """The rate changes in every step."""
    stages = [
        WarmupStage(WarmupPolicy.LINEAR, max_iters=5, value=0.1),
        WarmupStage(WarmupPolicy.POLY, max_iters=100, value=2.0, decay_iters=50),
    ]
    return WarmupOptimizer(combined(model), stages, lr=0.3)


def clipped(model: nn.Module) -> Any:
    """The dense gradients are clipped; the tables' wrapper hands the rate on."""
    inner = GradientClippingOptimizer(dense(model), GradientClipping.VALUE, max_gradient=0.01)
    return CombinedOptimizer([model.fused_optimizer, ("clipped", inner)])


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "combined": combined,
    "dense alone": dense,
    "warm-up": warmed_up,
    "clipped": clipped,
}

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.7**step),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=STEPS),
}


def by_torchrec(optimizer: str, schedule: str) -> Outcome:
    """A plain loop of TorchRec's base pipeline; the schedule is stepped after each batch."""
    model = sharded(Job())
    made = OPTIMIZERS[optimizer](model)
    stepped = SCHEDULES[schedule](made)
    pipeline = TrainPipelineBase(model, made, CPU)
    outputs, data = [], batches(STEPS)
    for _ in range(STEPS):
        outputs.append(pipeline.progress(data))
        if stepped is not None:
            stepped.step()
    return Outcome(outputs, everything(model))


def by_ours(name: str, optimizer: str, schedule: str) -> Outcome:
    """One of our pipelines; the schedule is part of the step."""
    model = sharded(Job())
    made = OPTIMIZERS[optimizer](model)
    stepped = SCHEDULES[schedule](made)
    step = TrainStep([made], schedules=[] if stepped is None else [stepped])
    with PipelineFactory.create(name, model=model, step=step, device=CPU) as pipeline:
        outputs = to_the_end(pipeline, batches(STEPS))
    return Outcome(outputs, everything(model))


def _differences(name: str, optimizer: str, schedule: str) -> list[str]:
    return by_ours(name, optimizer, schedule).differences(by_torchrec(optimizer, schedule))


@pytest.mark.parametrize(
    ("name", "optimizer", "schedule"), pairwise_cases(EXACT, OPTIMIZERS, SCHEDULES)
)
def test_torchrecs_optimizers_and_schedules_on_two_ranks(
    two_ranks: Ranks, name: str, optimizer: str, schedule: str
) -> None:
    """On dense and on fused parameters, each in every exact pipeline, bit for bit."""
    assert two_ranks.run(_differences, name, optimizer, schedule) == [[]] * 2


def _early_plan() -> str:
    model = sharded(Job())
    tasks = SparseDistTasks(model, TrainStep([combined(model)]), device="cpu")
    try:
        SWPipeline(plans.split(after_step=False), tasks.tasks(), device="cpu")
    except PlanError as error:
        return str(error)
    return "it runs"


def test_a_look_up_before_the_rate_is_known_is_refused(two_ranks: Ranks) -> None:
    """Looking up i + 1 before the optimizers of i takes the rate of i."""
    said = two_ranks.run(_early_plan)[0]
    assert "'optimizer'" in said
    assert "'EmbForward'" in said


def _from_outside(name: str) -> list[str]:
    model = sharded(Job())
    made = combined(model)
    schedule = LambdaLR(made, lambda step: 0.7**step)
    data: Iterator[Batch] = batches(STEPS)
    outputs = []
    with PipelineFactory.create(name, model=model, optimizer=made, device=CPU) as pipeline:
        for _ in range(STEPS):
            outputs.append(pipeline.progress(data))
            schedule.step()
    return Outcome(outputs, everything(model)).differences(by_torchrec("combined", "lambda"))


@pytest.mark.parametrize("name", EXACT)
def test_a_schedule_outside_of_the_step_is_exact(two_ranks: Ranks, name: str) -> None:
    """Between two calls of ``progress`` no batch in flight has been looked up."""
    assert two_ranks.run(_from_outside, name) == [[], []]


def _semi_sync() -> int:
    model = sharded(Job())
    made = combined(model)
    step = TrainStep([made], schedules=[LambdaLR(made, lambda step: 0.7**step)])
    with PipelineFactory.create(STALE, model=model, step=step, device=CPU) as pipeline:
        return len(to_the_end(pipeline, batches(STEPS)))


def test_semi_sync_says_that_its_rates_are_stale(two_ranks: Ranks) -> None:
    """Its plan names both states of which it reads older values."""
    assert plans.semi_sync().stale == {"tables": 1, "optimizer": 1}
    assert two_ranks.run(_semi_sync) == [STEPS, STEPS]
