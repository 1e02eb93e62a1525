"""A limit of memory is kept, and its cost is reported."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swpipe import IterContext, PipelinePlan, PipelineTask, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.task_memory import Block, TaskMemory
from swpipe.errors import PlanError
from swpipe.planning import Limits, auto_plan
from swpipe.planning.simulation.simulator import peak_of
from swpipe.profiler import measure_memory
from tests.support.memory_work import MemoryWork

MIB = 2**20


def held_by(plan: PipelinePlan, costs: CostModel) -> int:
    found = peak_of(plan, costs, streams=False)
    assert found is not None
    return found.bytes


@pytest.mark.parametrize("seed", range(3))
def test_random_plans_keep_the_limit(seed: int) -> None:
    """The limit is between the unlimited peak and the smallest one, which a refusal names."""
    work = MemoryWork(seed)
    free = auto_plan(work.plan, work.costs, streams=False, effort=0.02)
    with pytest.raises(PlanError, match="the smallest peak found is") as refused:
        auto_plan(work.plan, work.costs, streams=False, effort=0.02, limits=Limits(max_bytes=1))
    least = int(str(refused.value).rpartition(" bytes: ")[0].rpartition(" ")[2])
    limit = (least + held_by(free.plan, work.costs)) // 2
    limits = Limits(max_bytes=limit)
    found = auto_plan(work.plan, work.costs, streams=False, effort=0.02, limits=limits)
    assert held_by(found.plan, work.costs) <= limit


@pytest.mark.parametrize(
    ("seed", "limit", "ii_us"),
    [
        pytest.param(4, 122880, 92.2, id="another schedule, of fewer iterations in flight"),
        pytest.param(7, 92672, 58.6, id="the same schedule, with less depth"),
    ],
)
def test_both_ways_to_hold_less_are_taken(seed: int, limit: int, ii_us: float) -> None:
    """Without the first, no plan fits; without the second, one of 70.1 us."""
    work = MemoryWork(seed)
    limits = Limits(max_bytes=limit)
    found = auto_plan(work.plan, work.costs, streams=False, effort=0.02, limits=limits)
    assert held_by(found.plan, work.costs) <= limit
    assert found.ii_us <= ii_us + 0.1


def two_tasks() -> tuple[PipelinePlan, CostModel]:
    """Return a plan of two tasks of equal time, and costs; the first one leaves a MiB."""
    memory = TaskMemory((Block("read", "work", MIB, "x"),))
    costs = CostModel({"read": TaskCost(100), "work": TaskCost(100)}, memory=memory)
    plan = PipelinePlan({"read": TaskSchedule(), "work": TaskSchedule()}, deps=[("work", "read")])
    return plan, costs


def test_what_a_limit_costs_is_told() -> None:
    """Under 1 MiB nothing overlaps."""
    plan, costs = two_tasks()
    free = auto_plan(plan, costs, streams=False)
    assert held_by(free.plan, costs) == 2 * MIB
    found = auto_plan(plan, costs, streams=False, limits=Limits(max_bytes=MIB))
    assert held_by(found.plan, costs) == MIB
    assert found.ii_us == pytest.approx(200)
    assert "The limit of 1 MiB costs 0.100 ms per iteration: without it 0.100 ms." in found.why
    same = auto_plan(plan, costs, streams=False, limits=Limits(max_bytes=2 * MIB))
    assert same.plan == free.plan
    assert same.why[:-1] == free.why


def test_less_run_ahead_is_tried_before_less_depth() -> None:
    """Work that a stream has not done is held: with 2 MiB the host waits for the device."""
    memory = TaskMemory((Block("copy", "", MIB, "x"),))
    costs = CostModel(
        {"copy": TaskCost(100, device_us=100), "work": TaskCost(10, device_us=100)}, memory=memory
    )
    schedule = {"copy": TaskSchedule(stream="copy"), "work": TaskSchedule()}
    plan = PipelinePlan(schedule, deps=[("work", "copy")])
    free = auto_plan(plan, costs)
    assert (free.ii_us, free.in_flight, free.plan.run_ahead) == (100, 2, None)
    found = auto_plan(plan, costs, limits=Limits(max_bytes=2 * MIB))
    assert (found.ii_us, found.in_flight, found.plan.run_ahead) == (150, 2, 0)


def test_a_limit_that_cannot_be_kept_is_refused() -> None:
    """The error has the smallest peak."""
    plan, costs = two_tasks()
    with pytest.raises(PlanError, match="smallest peak found is 1 MiB, 1048576 bytes"):
        auto_plan(plan, costs, streams=False, limits=Limits(max_bytes=MIB - 1))


def test_what_an_optimizer_keeps_is_no_part_of_it() -> None:
    """It exists under any plan: with momentum, tasks need the same."""

    def needed(momentum: float) -> int:
        layer = nn.Linear(256, 1, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=momentum)

        def forward(ctx: IterContext) -> None:
            ctx.loss = layer(ctx.batch).square().mean()

        def step(ctx: IterContext) -> None:
            optimizer.zero_grad()
            ctx.loss.backward()
            optimizer.step()

        tasks = [PipelineTask("forward", forward), PipelineTask("step", step)]
        return measure_memory(tasks, [torch.ones(8, 256)], device="cpu").working["forward"]

    assert needed(0.0) == needed(0.9)
