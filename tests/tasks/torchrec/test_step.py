"""The user's own step: its parts, and that every plan runs them as a plain loop would."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe.tasks.torchrec import PipelineFactory, TrainStep
from swpipe.tasks.torchrec.wrappers import ddp_modules
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    batches,
    dense_optimizer,
    everything,
    sharded,
)
from tests.tasks.torchrec.trial import EXACT, Outcome, to_the_end

DENSE_ADAM = Job(fused=False, optimizer=torch.optim.Adam, options={"lr": 0.01})


def _losses(model: nn.Module) -> Callable[[Batch], Any]:
    """Calls the model, and makes a dict of two losses of it."""

    def forward(batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        loss, logits = model(batch)
        return {"clicks": loss, "twice": 2 * loss.unsqueeze(0)}, logits

    return forward


def _weigh(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    """Normalise by a count over all ranks: a collective of the step's own."""
    ranks = torch.ones(())
    dist.all_reduce(ranks)
    return {name: loss / ranks for name, loss in losses.items()}


def _halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 2


def _parts(job: Job, model: nn.Module) -> tuple[list[Any], list[Any]]:
    """One optimizer for the bottom network, one for the rest; a schedule for each."""
    (group,) = dense_optimizer(job, model).param_groups
    bottom, rest = group["params"][:2], group["params"][2:]
    optimizers = [torch.optim.SGD(bottom, lr=0.2), torch.optim.Adam(rest, lr=0.01)]
    return optimizers, [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in optimizers]


def _by_hand(job: Job, steps: int, accumulate: int) -> Outcome:
    model = sharded(job)
    optimizers, schedules = _parts(job, model)
    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    outputs = []
    for k, batch in enumerate(batches(steps)):
        last = (k + 1) % accumulate == 0 or k + 1 == steps
        if k % accumulate == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        with ExitStack() as stack:
            for module in ddp_modules(model) if k > 0 and not last else ():
                stack.enter_context(module.no_sync())
            losses, logits = _losses(model)(batch)
            weighed = _weigh(losses)
            loss = weighed["clicks"] + weighed["twice"].sum(0)
            loss.backward()
        outputs.append(logits)
        if last:
            _halve(model)
            nn.utils.clip_grad_norm_(parameters, 0.02)
            for thing in (*optimizers, *schedules):
                thing.step()
    return Outcome(outputs, everything(model))


def _own_step(job: Job, accumulate: int) -> dict[str, list[str]]:
    """Where the pipelines differ from a plain loop."""
    steps = 4 * accumulate + accumulate // 2
    wanted = _by_hand(job, steps, accumulate)
    found = {}
    for name in EXACT:
        model = sharded(job)
        optimizers, schedules = _parts(job, model)
        step = TrainStep(
            optimizers,
            forward=_losses(model),
            on_losses=_weigh,
            clip=0.02,
            schedules=schedules,
            accumulate=accumulate,
            finalize=_halve,
        )
        with PipelineFactory.create(name, model=model, step=step, device=CPU) as pipeline:
            outputs = to_the_end(pipeline, batches(steps))
        if where := Outcome(outputs, everything(model)).differences(wanted):
            found[name] = where
    return found


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_plan_runs_the_step_as_a_loop_would(
    two_ranks: Ranks, sharding: str, accumulate: int
) -> None:
    """A dict of losses, a collective over them, a gradient hook, clipping, two schedules."""
    assert two_ranks.run(_own_step, Job(sharding), accumulate) == [{}, {}]


def _scaled() -> list[str]:
    outcomes = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0)):
        model = sharded(DENSE_ADAM)
        step = TrainStep([dense_optimizer(DENSE_ADAM, model)], scaler=scaler)
        with PipelineFactory.create(
            "jagged_prefetch_sparse_dist", model=model, step=step, device=CPU
        ) as pipeline:
            outputs = to_the_end(pipeline, batches(5))
        outcomes.append(Outcome(outputs, everything(model)))
    return outcomes[0].differences(outcomes[1])


def test_a_scaler_scales_and_unscales(two_ranks: Ranks) -> None:
    """By a power of two it changes no bit."""
    assert two_ranks.run(_scaled) == [[], []]


def _scaler_with_fused_tables() -> str:
    model = sharded(Job())
    step = TrainStep([dense_optimizer(Job(), model)], scaler=torch.amp.GradScaler("cpu"))
    try:
        PipelineFactory.create("jagged_sw_serial", model=model, step=step, device=CPU)
    except ValueError as error:
        return str(error)
    return ""


def test_a_scaler_with_tables_that_update_themselves_is_refused(two_ranks: Ranks) -> None:
    """They would take the scaled gradients."""
    for said in two_ranks.run(_scaler_with_fused_tables):
        assert "with the scaled gradients" in said
        assert "bfloat16" in said


def _no_pair() -> str:
    model = sharded(Job())
    step = TrainStep([dense_optimizer(Job(), model)], forward=lambda batch: model(batch)[0])
    with PipelineFactory.create("jagged_sw_serial", model=model, step=step, device=CPU) as pipeline:
        try:
            pipeline.progress(batches(1))
        except TypeError as error:
            return str(error)
    return ""


def test_a_model_that_returns_no_pair_is_told(two_ranks: Ranks) -> None:
    """What it returned, and what is asked for."""
    assert "returned a Tensor, not (losses, output)" in two_ranks.run(_no_pair)[0]


# ------------------------------------------------------------------------- parts, on one rank


@pytest.fixture
def step() -> TrainStep:
    return TrainStep([torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)])


@pytest.mark.parametrize(
    ("losses", "total"),
    [
        (torch.tensor(2.0), 2.0),
        (torch.tensor([2.0, 3.0]), 5.0),
        ({"a": torch.tensor(2.0), "b": torch.tensor([3.0, 4.0])}, 9.0),
    ],
)
def test_losses_become_one_number(step: TrainStep, losses: Any, total: float) -> None:
    """A number, one per row, or a dict of these."""
    assert step.total(losses).item() == total


@pytest.mark.parametrize(
    ("losses", "kind"), [(3.0, "a float"), ({}, "a dict of nothing"), ({"a": 1}, "a dict of int")]
)
def test_losses_of_another_kind_are_told(step: TrainStep, losses: Any, kind: str) -> None:
    """With the part of the step that can mend them."""
    with pytest.raises(TypeError, match=rf"the losses are {kind};.*on_losses"):
        step.total(losses)


def test_a_step_needs_an_optimizer_and_a_count() -> None:
    """Said when the step is made."""
    with pytest.raises(ValueError, match="without an optimizer"):
        TrainStep([])
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(ValueError, match="accumulate is 0"):
        TrainStep([optimizer], accumulate=0)


def test_clipping_may_be_a_function_of_the_parameters() -> None:
    """It gets all that the optimizers step, each once."""
    layer = nn.Linear(2, 1)
    seen: list[Any] = []
    optimizers = [torch.optim.SGD(layer.parameters()), torch.optim.SGD([layer.bias])]
    TrainStep(optimizers, clip=seen.extend).update()
    assert [id(p) for p in seen] == [id(layer.weight), id(layer.bias)]
