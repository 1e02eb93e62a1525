"""prove_v_schedule: optima that are known, and optima of all orders of a small job."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("ortools")

from swpipe.plans.pipeline_parallel import PipelineCosts, check_schedule, prove_v_schedule
from swpipe.plans.pipeline_parallel.v_order import Objective, VOrders
from tests.plans.pipeline_parallel.zbv_figures import OPTIMA, Optimum

OBJECTIVES: tuple[Objective, ...] = ("makespan", "bubble")


def require_optima(row: Optimum) -> None:
    """Both optima, proved."""
    for objective, best in zip(OBJECTIVES, (row.best_makespan, row.best_bubble), strict=True):
        proof = prove_v_schedule(row.n, row.m, row.costs, objective=objective, seconds=2)
        assert (proof.value, proof.lower_bound, proof.is_optimal) == (best, best, True)
        report = check_schedule(proof.schedule, row.costs)
        assert getattr(report, objective) == best


@pytest.mark.parametrize(
    "row", [OPTIMA[1], OPTIMA[11]], ids=lambda row: "-".join(map(str, row[:6]))
)
def test_known_optima_are_proved(row: Optimum) -> None:
    """The solver's bound meets the schedule."""
    require_optima(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", OPTIMA, ids=lambda row: "-".join(map(str, row[:6])))
def test_all_known_optima_are_proved(row: Optimum) -> None:
    """The same in all twelve configurations."""
    require_optima(row)


ONE_MICROBATCH = [
    [0, 1, 2, *rest] for rest in itertools.permutations((3, 4, 5)) if rest.index(3) < rest.index(5)
]
"""All orders of a rank with one microbatch."""


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "costs",
    [
        PipelineCosts(3, 5, 7, 2),
        PipelineCosts((3, 1, 4), (1, 5, 9), (2, 6, 5), 3),
        PipelineCosts(1, (0.5, 2.25, 1, 1.7, 3, 0.1), (9, 1, 1, 1, 1, 4), 0.3, 3, -1, -2, 6),
    ],
)
def test_proof_is_the_best_of_all_orders(costs: PipelineCosts, objective: Objective) -> None:
    """Costs by rank and by stage, integers or not; every order of three ranks is timed."""
    orders = VOrders(3, 1, costs)
    every = (orders.times(list(rows)) for rows in itertools.product(ONE_MICROBATCH, repeat=3))
    best = min(times.value(objective) for times in every if times is not None)
    proof = prove_v_schedule(3, 1, costs, objective=objective, seconds=2)
    assert proof.value == pytest.approx(best, abs=1e-9)
    assert proof.lower_bound <= best + 1e-9
    assert proof.lower_bound == pytest.approx(best, abs=2e-3)
