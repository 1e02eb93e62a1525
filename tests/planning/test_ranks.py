"""A step on many ranks: exact without differences, and compared with theory and publications."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench import recsys14
from swpipe import HOST, PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.errors import PlanError
from swpipe.planning import Limits, Ranks, auto_plan, simulate
from swpipe.planning.modulo.input_slack import SlackPlan, ahead_of, with_slack
from swpipe.planning.rank_simulation import _mean_step_us, rank_step, step_us
from swpipe.planning.simulation.interval import interval_us
from swpipe.planning.simulation.timed_graph import timed_graph
from swpipe.plans.prefetch import prefetch_plan
from swpipe.plans.torchrec import sparse_dist
from swpipe.program import compile_plan

SLOW = {"read": (0.01, 5.0)}


COSTS14 = recsys14.costs(read_us=60_000)

WORKERS_FIRST = (
    *("read", "h2d", "start_shuffle", "finish_shuffle"),
    *("zero_grad", "global_tokens_allreduce", "nccl_safety_barrier"),
)
"""The order that the prototype had: worker groups before training."""


def steps_ms(plan: PipelinePlan, *ranks: Ranks) -> list[float]:
    """Return the steps on several numbers of ranks."""
    program = compile_plan(resolve_plan(plan), streams=True)
    return [step_us(program, COSTS14, each) / 1e3 for each in ranks]


READY_MADE = {
    **{f"sparse dist {name}": make() for name, make in sparse_dist.PLANS.items()},
    "prefetch": prefetch_plan(["a", "b"], ["c", "d"], streams={"a": HOST, "b": "copy"}),
    "several workers": prefetch_plan(["a"], ["b"], workers=3),
    "the published step": recsys14.plan(),
    "the published step, pipelined": recsys14.with_read(1),
}


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("name", READY_MADE)
def test_one_rank_whose_times_do_not_differ_takes_the_interval(name: str, streams: bool) -> None:
    """The ranks' arrays equal the timed graph, which is computed separately, for every plan."""
    plan = READY_MADE[name]
    costs = CostModel(
        {
            task: TaskCost(host_us=100.0 + 37 * n, device_us=900.0 * (n % 3))
            for n, task in enumerate(plan.schedule)
        }
    )
    graph = timed_graph(compile_plan(resolve_plan(plan), streams=streams), costs)
    alone_us = interval_us(plan, costs, streams=streams)
    if not graph.contended:
        assert _mean_step_us(graph, Ranks(1), ()) == pytest.approx(alone_us, rel=1e-6)
    found = simulate(plan, costs, streams=streams, ranks=Ranks(8)).ranks
    assert found is not None
    assert (found.step_us, found.input_us, found.slowest_us) == (alone_us, 0.0, 0.0)


def expected_maximum(number: int, jitter: float) -> float:
    """Return the mean of the maximum of ``number`` lognormal factors, by integration."""
    sigma = math.sqrt(math.log1p(jitter**2))
    z = np.linspace(-9, 9, 20_001)
    below = np.array([0.5 * (1 + math.erf(one / math.sqrt(2))) for one in z]) ** number
    return float(np.sum(np.exp(sigma * (z[1:] + z[:-1]) / 2 - sigma**2 / 2) * np.diff(below)))


@pytest.mark.parametrize("number", [1, 2, 16, 1_024, 4_096])
def test_ranks_that_differ_in_speed_alone_take_the_slowest_ones_time(number: int) -> None:
    """This holds for serial work; and no plan does better, as the lower bound says."""
    plan = PipelinePlan({"train": TaskSchedule(globally_ordered=True)})
    costs = CostModel({"train": TaskCost(host_us=1_000)})
    found = simulate(plan, costs, streams=False, ranks=Ranks(number, jitter=0.05)).ranks
    assert found is not None
    wanted_us = 1_000 * expected_maximum(number, 0.05)
    assert found.step_us == pytest.approx(wanted_us, rel=0.01)
    assert found.floor_us == pytest.approx(wanted_us, rel=0.01)
    assert found.work_us == 1_000
    parts_us = found.work_us + found.input_us + found.slowest_us
    assert parts_us == pytest.approx(found.step_us, rel=1e-9)


@pytest.mark.slow
def test_the_published_step_on_1024_ranks() -> None:
    """It is that of an independent prototype: slack before the collective absorbs slow reads."""
    both, jitter = Ranks(1_024, 0.05, SLOW), Ranks(1_024, 0.05)
    serial = recsys14.with_read(pipelined=False, run_ahead=0)
    assert steps_ms(serial, both, jitter) == pytest.approx([456, 208], rel=0.03)
    launched = steps_ms(replace(serial, run_ahead=1), both, jitter)
    assert launched == pytest.approx([230, 127], rel=0.03)
    before = steps_ms(recsys14.with_read(order=WORKERS_FIRST), both, jitter)
    assert before == pytest.approx([225, 127], rel=0.03)
    slack = [steps_ms(recsys14.with_read(n, order=WORKERS_FIRST), both)[0] for n in (1, 2, 3)]
    assert slack == pytest.approx([158, 136, 127], rel=0.03)
    assert steps_ms(recsys14.with_read(run_ahead=4), both) == pytest.approx([127], rel=0.03)
    # Where training has its turn first, the same takes one batch less.
    turns = [steps_ms(recsys14.with_read(n), both)[0] for n in (0, 1, 2)]
    assert turns == pytest.approx([158, 136, 127], rel=0.03)


@pytest.mark.slow
def test_the_planner_chooses_what_absorbs_slow_reads() -> None:
    """It is within 1% of the best known plan, with no more iterations ahead."""
    choice = auto_plan(
        recsys14.with_read(pipelined=False),
        COSTS14,
        limits=Limits(in_flight=8, groups=4, frozen=recsys14.FROZEN),
        ranks=Ranks(1_024, 0.05, SLOW),
    )
    assert choice.ranks is not None
    assert choice.ranks.step_us <= 127_400 * 1.01
    assert choice.ranks.floor_us <= choice.ranks.step_us
    assert "waiting for the slowest rank" in choice.format()


NO_STREAMS = {
    "read": TaskSchedule(thread_group="io"),
    "train": TaskSchedule(1, globally_ordered=True),
}
TWO = CostModel({"read": TaskCost(host_us=6_000), "train": TaskCost(host_us=10_000)})


def on_cpu(**more: Any) -> PipelinePlan:
    """Return a plan of a read that overlaps training."""
    return PipelinePlan(NO_STREAMS, deps=[("train", "read")], **more)


def test_input_slack_is_found_within_the_limits() -> None:
    """Iterations in flight are added if they absorb slow reads, not if only speeds vary."""
    many, deep = Ranks(64, slow={"read": (0.02, 4.0)}), Limits(in_flight=8, groups=2)
    start = PipelinePlan(
        {"read": TaskSchedule(), "train": TaskSchedule(globally_ordered=True)},
        deps=[("train", "read")],
    )
    alone = auto_plan(start, TWO, limits=deep, streams=False)
    chosen = auto_plan(start, TWO, limits=deep, streams=False, ranks=many)
    least = auto_plan(start, TWO, limits=replace(deep, in_flight=2), streams=False, ranks=many)
    steady = auto_plan(start, TWO, limits=deep, streams=False, ranks=Ranks(64, jitter=0.05))
    assert alone.in_flight == least.in_flight == steady.in_flight == 2
    assert 2 < chosen.in_flight <= 8
    assert chosen.ranks is not None
    assert least.ranks is not None
    assert chosen.ranks.step_us < 0.8 * least.ranks.step_us
    assert "of input slack" in chosen.why[-1]
    assert steady.why[-1] == "More input slack takes no waiting away."


@pytest.mark.parametrize(("groups", "threads"), [(2, 4), (3, 5)])
def test_input_gets_a_thread_within_the_limit_on_groups(groups: int, threads: int) -> None:
    """Three workers of another group are one group, and the input is a third one."""
    schedule = {
        "read": TaskSchedule(),
        "train": TaskSchedule(globally_ordered=True),
        "log": TaskSchedule(thread_group="pool", workers=3),
    }
    plan = PipelinePlan(schedule, deps=[("train", "read"), ("log", "read")])
    costs = replace(TWO, tasks={**TWO.tasks, "log": TaskCost(host_us=10)})
    found = with_slack(
        plan,
        costs,
        Ranks(64, slow={"read": (0.02, 4.0)}),
        Limits(in_flight=8, groups=groups),
        streams=False,
        may_run_ahead=True,
        allowed=lambda plan: True,
    )[0]
    assert found.plan.threads == threads


def test_run_ahead_is_chosen_before_as_much_slack() -> None:
    """Both absorb the slow reads with as many iterations ahead; slack needs more depth."""
    plan = PipelinePlan(
        {
            "read": TaskSchedule(stream="copies"),
            "train": TaskSchedule(globally_ordered=True),
        },
        deps=[("train", "read")],
    )
    costs = CostModel(
        {"read": TaskCost(host_us=6_000), "train": TaskCost(host_us=100, device_us=10_000)}
    )
    chosen, slack_alone = (
        with_slack(
            plan,
            costs,
            Ranks(64, slow={"read": (0.02, 4.0)}),
            Limits(in_flight=8, groups=2),
            streams=True,
            may_run_ahead=may_run_ahead,
            allowed=lambda plan: True,
        )[0]
        for may_run_ahead in (True, False)
    )
    assert (chosen.slack, chosen.plan.run_ahead, chosen.plan.depth) == (0, 4, plan.depth)
    assert (slack_alone.slack > 0, slack_alone.plan.run_ahead) == (True, None)
    assert ahead_of(chosen.plan) <= ahead_of(slack_alone.plan)
    assert chosen.step_us == pytest.approx(slack_alone.step_us, rel=0.01)


def test_a_plan_that_is_not_allowed_is_not_chosen() -> None:
    """It holds too much, for example, or could give other numbers."""

    def chosen(allowed: Callable[[PipelinePlan], bool]) -> SlackPlan:
        return with_slack(
            on_cpu(),
            TWO,
            Ranks(64, slow={"read": (0.02, 4.0)}),
            Limits(in_flight=8, groups=2),
            streams=False,
            may_run_ahead=True,
            allowed=allowed,
        )[0]

    first = chosen(lambda plan: True)
    second = chosen(lambda plan: plan != first.plan)
    assert second.plan != first.plan
    assert second.step_us == pytest.approx(first.step_us, rel=0.01)
    assert chosen(lambda plan: plan.depth <= 3).plan.depth == 3


def test_the_same_ranks_give_the_same_step() -> None:
    """The draws have a fixed seed."""
    program = compile_plan(resolve_plan(on_cpu()), streams=False)
    ranks = Ranks(100, 0.1, {"read": (0.1, 3.0)})
    assert rank_step(program, TWO, ranks) == rank_step(program, TWO, ranks)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"number": 0}, "number of ranks is 0"),
        ({"number": 2.5}, "number of ranks is 2.5"),
        ({"number": 100_000}, "from 1 to 65,536"),
        ({"jitter": -0.1}, "jitter is -0.1"),
        ({"jitter": math.nan}, "jitter is nan"),
        ({"slow": {"read": (1.5, 2.0)}}, "slow iterations of 'read' are (1.5, 2.0)"),
        ({"slow": {"read": (0.5, 0.5)}}, "a factor of 1 or more"),
        ({"slow": {"read": 0.5}}, "give (share, factor)"),
        ({"slow": ["read"]}, "slow is ['read']"),
        ({"links": "nccl"}, "links is 'nccl'"),
    ],
)
def test_ranks_that_cannot_be_are_refused(given: dict[str, Any], told: str) -> None:
    """The error has the value and the rule."""
    with pytest.raises(PlanError) as caught:
        Ranks(**{"number": 4, **given})
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "schedule", "told"),
    [
        (Ranks(2, slow={"raed": (0.1, 2.0)}), NO_STREAMS, "slow names 'raed'"),
        (Ranks(2, links=["nvlink"]), NO_STREAMS, "links names 'nvlink'"),
        (Ranks(2, jitter=0.1), {"read": TaskSchedule(), "train": TaskSchedule()}, "no task meets"),
    ],
)
@pytest.mark.parametrize("call", [simulate, auto_plan])
def test_ranks_that_do_not_fit_the_plan_are_refused(
    ranks: Ranks, schedule: dict[str, TaskSchedule], told: str, call: Any
) -> None:
    """Each function that gets them refuses, and says what to type."""
    with pytest.raises(PlanError, match=told):
        call(PipelinePlan(schedule), TWO, streams=False, ranks=ranks)


def test_a_task_with_a_link_meets_others() -> None:
    """A task in global order does, too; other tasks belong to each rank alone."""
    costs = CostModel({"a": TaskCost(host_us=1_000, resources=("net",))})
    ranks = Ranks(64, jitter=0.1, links=["net"])
    found = simulate(PipelinePlan({"a": TaskSchedule()}), costs, streams=False, ranks=ranks).ranks
    assert found is not None
    assert found.step_us == pytest.approx(1_000 * expected_maximum(64, 0.1), rel=0.01)
