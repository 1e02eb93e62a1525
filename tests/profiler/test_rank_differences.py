"""Differences between ranks are found in tables that were drawn with them."""

from __future__ import annotations

import numpy as np
import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.profiler.rank_differences import rank_differences
from swpipe.reporting.rank_forecast import rank_forecast

ITERATIONS = 240

PLAN = PipelinePlan(
    {
        "read": TaskSchedule(thread_group="io"),
        "exchange": TaskSchedule(globally_ordered=True),
        "train": TaskSchedule(1),
    },
    deps=[("exchange", "read"), ("train", "exchange")],
)


MEETS = ("exchange",)


def measured(rank: int, *, jitter: float = 0.05, longer_us: float = 0.0) -> CostModel:
    """Return the tables of a rank with 5% jitter, and 4% of the reads five times as long."""
    rng = np.random.default_rng(rank)
    sigma = np.sqrt(np.log1p(jitter**2))
    factor = np.exp(rng.normal(-(sigma**2) / 2, sigma, ITERATIONS))
    slow = np.where(rng.random(ITERATIONS) < 0.04, 5.0, 1.0)
    each = {
        "read": 4_000 * factor * slow,
        "exchange": np.full(ITERATIONS, 500.0 + 3_000 * rank),
        "train": (10_000 + longer_us) * factor,
    }
    tasks = {n: TaskCost(host_us=us.mean(), host_each_us=tuple(us)) for n, us in each.items()}
    return CostModel(tasks)


def test_jitter_and_slow_iterations_are_those_of_the_tables() -> None:
    """They agree within the accuracy of 480 iterations; costs do not include either."""
    found = rank_differences([measured(0), measured(1)], MEETS)
    assert found.ranks.number == 2
    assert found.ranks.jitter == pytest.approx(0.05, abs=0.006)
    assert {*found.ranks.slow} == {"read"}
    share, factor = found.ranks.slow["read"]
    assert share == pytest.approx(0.04, abs=0.02)
    assert factor == pytest.approx(5.0, rel=0.1)
    assert found.costs.tasks["read"].host_us == pytest.approx(4_000, rel=0.05)
    assert found.costs.tasks["train"].host_us == pytest.approx(10_000, rel=0.02)
    assert found.costs.iterations == 0


def test_a_collective_costs_what_it_takes_the_rank_that_waits_least() -> None:
    """The others wait in it, which is no cost of their own, and makes them no stragglers."""
    found = rank_differences([measured(0), measured(1)], MEETS)
    assert found.costs.tasks["exchange"].host_us == 500
    assert found.task != "exchange"


def test_the_slowest_rank_and_its_task_are_named() -> None:
    """It does not matter in which task the others wait."""
    models = [measured(0), measured(1), measured(2, longer_us=2_000)]
    found = rank_differences(models, MEETS)
    assert (found.slowest, found.task) == (2, "train")
    assert found.longer_us == pytest.approx(2_000, rel=0.1)


def test_ranks_whose_costs_are_known_as_means_differ_in_nothing() -> None:
    """No difference is invented."""
    model = CostModel({name: TaskCost(host_us=1_000) for name in PLAN.schedule})
    found = rank_differences([model, model], MEETS)
    assert (found.ranks.jitter, found.ranks.slow, found.longer_us) == (0.0, {}, 0.0)


def test_the_forecast_says_what_waits_and_what_takes_it_away() -> None:
    """It covers the measured ranks, 1,024 ranks, and slack; it names slow ranks."""
    found = rank_differences([measured(0), measured(1, longer_us=1_000)], MEETS)
    forecast = rank_forecast(PLAN, found, streams=False, allowed=lambda plan: True)
    assert forecast.few.slowest_us < forecast.many.slowest_us
    assert forecast.slack_us < 0.95 * forecast.many.step_us
    text = forecast.text
    assert "On 2 ranks" in text
    assert "on 1,024 expect" in text
    assert "of input slack" in text
    assert "Rank 1 is the slowest; train takes it" in text
    kept = rank_forecast(PLAN, found, streams=False, allowed=lambda plan: False)
    assert kept.slack_us == kept.many.step_us
    assert "input slack" not in kept.text
