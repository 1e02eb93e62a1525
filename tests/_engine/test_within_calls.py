"""A plan may say that worker groups run within the caller's calls only."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from swpipe import IterContext, PipelinePlan, SWPipeline, TaskSchedule
from swpipe.analysis.happens_before import HappensBefore
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.planning.simulation.simulator import simulate
from swpipe.program import ADMIT, BEGIN, RETIRE, compile_plan
from swpipe.program.program_text import format_program
from tests.device.virtual import VirtualDevice
from tests.support.budget import seeds
from tests.support.plans_for_tests import piped, spread, tasks
from tests.support.strategies import random_case

PLANS = 15


@pytest.mark.examples
@pytest.mark.parametrize("streams", [False, True])
def test_every_period_ends_before_the_next_call_begins(streams: bool) -> None:
    """On any plan, all tasks of a period run between the caller's first and last instruction."""
    for seed in seeds("plans", PLANS):
        plan = replace(random_case(seed).plan, within_calls=True)
        program = compile_plan(resolve_plan(plan), streams=streams)
        order, instructions = HappensBefore(program), program.instructions
        head = program.lanes[0].instructions[0].task
        workers = [ins for lane in program.lanes[1:] for ins in lane.instructions]
        assert not workers or head in (ADMIT, BEGIN)
        for ins in workers:
            within_period = ins.stage - instructions[RETIRE].stage
            assert order.host(ins.task, RETIRE, within_period), seed
            assert order.host(head, ins.task, -ins.stage), seed
        for first, then in product(workers, repeat=2):  # of two periods in a row
            assert order.host(first.task, then.task, 1 + first.stage - then.stage), seed


@pytest.mark.parametrize("on_streams", [False, True])
def test_all_tasks_of_a_period_have_run_when_the_call_returns(on_streams: bool) -> None:
    """After the n-th call each task of stage s has run on n + last stage - s iterations."""
    plan = replace(
        spread(("io", "dist", "default", "io", "late")) if not on_streams else piped(),
        within_calls=True,
    )
    done: Counter[str] = Counter()
    in_call = False

    def count(name: str, ctx: IterContext) -> None:
        assert in_call
        done[name] += 1

    fns = {name: partial(count, name) for name in plan.schedule}
    device = VirtualDevice(0) if on_streams else "cpu"
    with SWPipeline(
        plan, tasks(**fns), device=device, stall_timeout_s=None, check_effects=False
    ) as pipe:
        batches = iter(range(20))
        for n in range(1, 10):
            in_call = True
            pipe.progress(batches)
            in_call = False
            expected = {
                name: n + plan.max_stage - entry.stage for name, entry in plan.schedule.items()
            }
            assert done == expected


def test_the_head_of_the_lane_is_an_instruction_of_its_own_only_where_admission_is_not() -> None:
    """With streams, ``<admit>`` stays in the middle, and ``<begin>`` is first."""
    plan = replace(
        PipelinePlan(
            {
                "copy": TaskSchedule(0, stream="memcpy"),
                "exchange": TaskSchedule(1, thread_group="io"),
                "train": TaskSchedule(1),
            },
            deps=[("train", "copy")],
        ),
        within_calls=True,
    )
    resolved = resolve_plan(plan)
    on_cpu, on_streams = (compile_plan(resolved, streams=kind) for kind in (False, True))
    assert on_cpu.lanes[0].instructions[0].task == ADMIT
    assert [ins.task for ins in on_streams.lanes[0].instructions] == [
        BEGIN, "train", ADMIT, "copy", RETIRE,
    ]  # fmt: skip
    assert [w.producer for w in on_streams.lanes[1].instructions[0].host_waits] == [BEGIN]
    assert "\ndefault: <begin>@" in format_program(on_streams)
    assert not on_streams.instructions[BEGIN].record


@pytest.mark.parametrize("streams", [False, True])
def test_a_simulation_knows_that_workers_wait_for_the_call(streams: bool) -> None:
    """A worker that may not run ahead between two calls is waited for in each call."""
    plan = PipelinePlan(
        {"read": TaskSchedule(0, thread_group="io"), "train": TaskSchedule(0)},
        deps=[("train", "read")],
        pipeline_depth=3,
    )
    costs = CostModel({"read": TaskCost(40), "train": TaskCost(40)}, handover_us=0)
    assert simulate(plan, costs, streams=streams).ii_us == 40
    bound = simulate(replace(plan, within_calls=True), costs, streams=streams)
    assert bound.ii_us == 80
