"""Plans tried on a few ranks are compared as on many ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swpipe import PipelinePlan, PipelineTask, TaskSchedule, autotune
from swpipe.core.costs import CostModel, TaskCost
from swpipe.errors import PlanError
from swpipe.planning import Ranks
from swpipe.tuning.rank_waits import on_ranks
from swpipe.tuning.tried_plans import Candidate, choose

COSTS = CostModel({"read": TaskCost(host_us=6_000), "train": TaskCost(host_us=10_000)})
RANKS = Ranks(256, slow={"read": (0.02, 4.0)})


def ahead(slack: int) -> PipelinePlan:
    """Return a plan of a read that overlaps training, ``count`` batches further ahead."""
    schedule = {
        "read": TaskSchedule(thread_group="io"),
        "train": TaskSchedule(1 + slack, globally_ordered=True),
    }
    return PipelinePlan(schedule, deps=[("train", "read")])


def test_a_plan_that_absorbs_slow_batches_is_chosen_for_many_ranks() -> None:
    """On the ranks of the trial two plans took the same time; there the simpler one is kept."""
    names = {"no slack": 0, "slack": 3}
    tried = [Candidate(n, ahead(k), 10_000, (), (10_000, 10_010)) for n, k in names.items()]
    assert choose(tried).name == "no slack"

    def for_ranks(ranks: Ranks) -> tuple[Candidate, ...]:
        return on_ranks(tried, COSTS, ranks, ahead(0), tried_on=2, streams=False)

    assert choose(for_ranks(RANKS)).name == "slack"
    assert list(for_ranks(replace(RANKS, number=2))) == tried


def test_autotune_hands_the_ranks_to_the_planner() -> None:
    """It refuses those that do not fit the tasks."""
    tasks = [PipelineTask("read", lambda ctx: None), PipelineTask("train", lambda ctx: None)]
    with pytest.raises(PlanError, match="slow names 'raed'"):
        autotune(
            tasks,
            [0, 1],
            device="cpu",
            ready_made={"ahead": ahead(0)},
            ranks=Ranks(8, slow={"raed": (0.1, 2.0)}),
        )
