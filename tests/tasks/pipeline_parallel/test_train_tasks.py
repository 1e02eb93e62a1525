"""The schedule's step as a task: batches are loaded while it runs, with the same numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import count, islice
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from docs.examples.moe_gpt import mean_loss
from swpipe import SWPipeline
from swpipe.plans.pipeline_parallel import check_schedule, torch_schedule
from swpipe.plans.pipeline_parallel.pipeline_training import LOAD, PLANS, STEP
from swpipe.tasks.pipeline_parallel import (
    PipelineRuntime,
    PipelineTrainTasks,
    SerialRuntime,
    measure_costs,
    measured_costs,
)
from swpipe.tasks.pipeline_parallel.measured_costs import Bytes
from tests.support.ranks import Ranks
from tests.tasks.pipeline_parallel.by_hand import PlainLoop
from tests.tasks.pipeline_parallel.small_gpt import batch, on_rank, whole

STEPS = 3


def load(number: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return a batch of eight rows."""
    inputs, target = batch(8, number)
    return (inputs,), target


def trained_by_hand() -> tuple[list[Tensor], list[Tensor]]:
    """Return the losses of each step, and the final parameters, of a plain loop."""
    loop = PlainLoop(whole(4), 4, mean_loss)
    parameters = [p for module in loop.modules for p in module.parameters()]
    optimizer, losses = torch.optim.AdamW(parameters), []
    for number in range(STEPS):
        inputs, target = batch(8, number)
        losses.append(loop.train(inputs, target=target).losses)
        optimizer.step()
    return losses, [p.detach() for p in parameters]


def trained(plan: str, *, serial: bool = False) -> tuple[list[Tensor | None], list[Tensor]]:
    """Train under a plan on ranks, or by the serial runtime; return losses and parameters."""
    if serial:
        runtime: Any = SerialRuntime(whole(4), 4, mean_loss)
    else:
        schedule = torch_schedule("zbv", 2, 4)
        runtime = PipelineRuntime(schedule, on_rank(schedule, dist.get_rank()), mean_loss)
    parameters = [p for module in runtime.modules for p in module.parameters()]
    tasks = PipelineTrainTasks(runtime, torch.optim.AdamW(parameters), load).tasks()
    with SWPipeline(PLANS[plan](), tasks, check_effects=True) as pipe:
        losses = [ctx.losses for ctx in pipe.iterate(range(STEPS))]
    return losses, [p.detach() for p in parameters]


def test_all_plans_train_the_same_numbers(two_ranks: Ranks) -> None:
    """Under each ready-made plan, losses and parameters are those of a plain loop."""
    losses, parameters = trained_by_hand()
    cuts = [len(list(module.parameters())) for module in whole(4)]
    rest = iter(parameters)
    parts = [list(islice(rest, count)) for count in cuts]
    for plan in PLANS:
        alone, whole_model = trained(plan, serial=True)
        assert all(map(torch.equal, alone, losses))  # type: ignore[arg-type]
        assert all(map(torch.equal, whole_model, parameters))
        (first, ends), (none, middle) = two_ranks.run(trained, plan)
        assert none == [None] * STEPS
        assert all(map(torch.equal, first, losses))
        assert all(map(torch.equal, ends, parts[0] + parts[3]))
        assert all(map(torch.equal, middle, parts[1] + parts[2]))


def test_the_next_batch_is_loaded_while_the_schedule_runs_in_one_order_on_all_ranks() -> None:
    """It is on a separate thread, a stage ahead; the step is globally ordered in every plan."""
    ahead = PLANS["ahead"]()
    assert (ahead.schedule[LOAD].stage, ahead.schedule[STEP].stage) == (0, 1)
    assert ahead.schedule[LOAD].thread_group != ahead.schedule[STEP].thread_group == "default"
    assert all(make().schedule[STEP].globally_ordered for make in PLANS.values())


def costs() -> Any:
    """Return measured costs of a V on two ranks, and whether all gradients are unchanged."""
    own = on_rank(torch_schedule("zbv", 2, 4), dist.get_rank())
    inputs, target = batch(2)
    found = measure_costs(
        own, 4, lambda stage: inputs if stage == 0 else torch.randn(2, 6, 16), mean_loss, target,
        rounds=9,  # of which the median is not that of a busy moment
    )  # fmt: skip
    return found, [p.grad for module in own.values() for p in module.parameters()]


def test_costs_are_measured_alike_on_all_ranks(two_ranks: Ranks) -> None:
    """They are medians of several rounds per stage; gradients stay as they were."""
    (ours, grads), (theirs, _) = two_ranks.run(costs)
    assert ours == theirs
    assert set(grads) == {None}
    assert [len(times) for times in (ours.forward, ours.backward, ours.weight)] == [4, 4, 4]
    assert min(*ours.forward, *ours.backward, *ours.weight, ours.hop) > 0


def costs_of_a_slow_runtime() -> Any:
    """Return measured costs if a step of one microbatch takes 8,000 s."""
    with mock.patch.object(measured_costs, "_step_ms", return_value=8e6):
        return costs()[0]


def test_the_time_of_the_runtime_belongs_to_the_passes(two_ranks: Ranks) -> None:
    """It belongs to F and I of each of four stages alike, and not to W."""
    for found in two_ranks.run(costs_of_a_slow_runtime):
        assert [round(time / 1e6, 2) for time in (*found.forward, *found.backward)] == [1] * 8
        assert max(found.weight) < 1e6


def hop_of_one_second() -> float:
    """Return the measured hop if sending and receiving takes a second."""
    seconds = count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    with mock.patch.object(measured_costs, "time", clock):
        return measured_costs.measure_hop(torch.ones(1), rounds=3)


def test_a_hop_is_half_of_the_time_to_and_fro(two_ranks: Ranks) -> None:
    """It is in ms."""
    assert two_ranks.run(hop_of_one_second) == [500, 500]


class Wide(nn.Module):
    """A stage of two linear maps with a large value between; ``again`` recomputes it."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again, self.up, self.down = again, nn.Linear(8, 1024), nn.Linear(1024, 8)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map rows and shift each by an id; pass the ids on."""
        inner = partial(checkpoint, self._inner, use_reentrant=False) if self.again else self._inner
        return inner(x) + ids[:, None], ids

    def _inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


ROWS = 32
KEPT = ROWS * 1024 * 4
"""The bytes that a ``Wide`` keeps: its tanh from F on, and the gradient of that from I on."""


def first_of(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Return a loss."""
    return (output[0] - target).square().mean()


def memory(again: bool) -> tuple[Any, float, float]:
    """Return measured costs, and the predicted and measured peak bytes of a step on this rank."""
    rank = dist.get_rank()
    given = torch.ones(ROWS, 8), torch.zeros(ROWS, dtype=torch.int64)
    schedule = torch_schedule("zbv", 2, 6)
    own = {s: Wide(again) for s, place in enumerate(schedule.placement) if place == rank}
    costs = measure_costs(own, 4, lambda stage: given, first_of, given[0], rounds=1)
    predicted = check_schedule(schedule, replace(costs, max_mem=math.inf)).peak_memory[rank]
    runtime = PipelineRuntime(schedule, own, first_of)
    batch = [one.repeat(6, *[1] * (one.dim() - 1)) for one in given]
    runtime.train(*batch, target=batch[0])
    with Bytes(()) as seen:
        runtime.train(*batch, target=batch[0])
    grads = sum(
        p.grad.nbytes for chunk in own.values() for p in chunk.parameters() if p.grad is not None
    )
    return costs, predicted, seen.look()[1] - grads


def test_memory_is_measured_and_foretold(two_ranks: Ranks) -> None:
    """It is in bytes, for stages with several tensors, and with recomputation."""
    for again in (False, True):
        found = two_ranks.run(memory, again)
        for costs, predicted, seen in found:
            assert costs == found[0][0]
            kept, left, freed = costs.f_mem[1], costs.b_mem[1], costs.w_mem[1]
            assert kept + left + freed == 0
            assert (kept > 0.9 * KEPT, left > 0.9 * KEPT) == (not again, True)
            assert 0.95 < predicted / seen < 1.05
