"""Pairs in a schedule: what is refused, what they cost, and where the planner makes them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swpipe.plans.pipeline_parallel import (
    Pair,
    PipelineCosts,
    PipelineSchedule,
    ScheduleError,
    check_schedule,
    plan_v_schedule,
    torch_schedule,
)

COSTS = PipelineCosts(20, 20, 10, hop=0.5, max_mem=math.inf)
ONE_RANK = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1"


def test_a_pair_takes_its_own_time() -> None:
    """It is given for the F's stage; else it is the sum, and never less than the longer part."""
    schedule = PipelineSchedule.from_csv(ONE_RANK)
    both = 4 * 20 + 4 * 30
    for pair, took in ((None, 50), (42, 42), ([44, 1], 44), (1, 30)):
        report = check_schedule(schedule, replace(COSTS, pair=pair))
        assert report.makespan == both - 50 + took
        assert report.bubbles == (0,)
    assert check_schedule(schedule.in_sequence, replace(COSTS, pair=1)).makespan == both
    assert [one.task for one in report.trace().spans][2] == "0F+1B"
    with pytest.raises(ScheduleError, match="pair has 3 numbers"):
        check_schedule(schedule, replace(COSTS, pair=[1, 1, 1]))
    with pytest.raises(ScheduleError, match="pair is 0: give a number above 0"):
        replace(COSTS, pair=0)


def test_a_pair_waits_for_what_both_parts_need() -> None:
    """Its results exist when both are done."""
    text = "0F0,(0F1;1B0)OVERLAP_F_B,0B0,0B1,1B1"
    with pytest.raises(ScheduleError, match="1F0 is missing on rank 0"):
        PipelineSchedule.from_csv(text)
    report = check_schedule(
        PipelineSchedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1"),
        replace(COSTS, pair=40),
    )
    times = {str(one.action): one.start for row in report.times for one in row}
    assert times["(0F1;0B0)OVERLAP_F_B"] == 20 + 0.5 + 50 + 0.5
    assert times["1F1"] == 71 + 40 + 0.5


def pairs_of(schedule: PipelineSchedule) -> int:
    """Return the number of pairs."""
    return sum(isinstance(entry, Pair) for row in schedule.rows for entry in row)


@pytest.mark.parametrize("objective", ["makespan", "period"])
def test_the_planner_pairs_where_it_pays(objective: str) -> None:
    """The result is never worse than without pairs, or than DualPipe-V."""
    alone = plan_v_schedule(2, 8, COSTS, objective=objective, effort=0.01)  # type: ignore[arg-type]
    assert pairs_of(alone.schedule) == 0
    for pair in (35, 48, 50):
        costs = replace(COSTS, pair=pair)
        plan = plan_v_schedule(2, 8, costs, objective=objective, effort=0.01)  # type: ignore[arg-type]
        report = check_schedule(plan.schedule, costs)
        dual = check_schedule(torch_schedule("dualpipev", 2, 8), costs)
        assert plan.value == getattr(report, objective)
        assert plan.lower_bound <= plan.value <= min(alone.value, getattr(dual, objective))
        assert (pairs_of(plan.schedule) > 0) == (pair < 50)


def test_pairs_keep_within_memory() -> None:
    """A schedule with pairs is made for the same limit."""
    costs = PipelineCosts(20, 20, 10, hop=0.5, pair=35, max_mem=8)
    plan = plan_v_schedule(2, 8, costs, effort=0.01)
    assert max(check_schedule(plan.schedule, costs).peak_memory) <= 8
