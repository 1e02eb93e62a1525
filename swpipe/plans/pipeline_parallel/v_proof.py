"""The best value of a small V, proved: a model of all orders for a solver (CP-SAT).

Each pass of each rank has a start; passes of a rank do not overlap; each comes after what it needs.
Memory is a level that changes at the starts. Microbatches are numbered as each stage takes them,
which loses nothing (``v_order``). The first pass of a rank is F0 of microbatch 0, at a time that is
known, so the largest bubble is linear as well.

Times and memory that are no integers are rounded to a unit, so that the model admits what the true
ones admit: its bound stays a bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from swpipe._solver import require_ortools, solve
from swpipe.plans.pipeline_parallel.pipeline_costs import PipelineCosts
from swpipe.plans.pipeline_parallel.v_bounds import first_starts
from swpipe.plans.pipeline_parallel.v_order import NEEDS, Objective, Order, VOrders
from swpipe.plans.pipeline_parallel.v_planner import VPlan, plan_v_schedule

_PLANNING_S = 1.0
"""At most so many seconds, and a tenth of the time, for a plan to begin with."""

_STEPS = 100_000
"""Units in the largest time that is no integer, and in the memory."""


def prove_v_schedule(
    n_stage: int,
    n_micro: int,
    costs: PipelineCosts,
    *,
    objective: Objective = "makespan",
    seconds: float = 60.0,
    workers: int = 1,
) -> VPlan:
    """Find the best schedule of two chunks per rank in a V, and prove it.

    For small cases: 2 ranks and 4 microbatches take seconds. What is not proved in time is left as
    a gap between the lower bound and the value.

    Args:
        n_stage: The number of ranks.
        n_micro: The number of microbatches.
        costs: What the passes cost.
        objective: As for ``plan_v_schedule``.
        seconds: For planning and the solver together.
        workers: Threads of the solver.

    Returns:
        The best schedule; its ``is_optimal`` says whether that is proved.

    Raises:
        ScheduleError: As for ``plan_v_schedule``.
        ImportError: OR-Tools is not installed.
    """
    require_ortools()
    began = time.monotonic()
    plan = plan_v_schedule(
        n_stage, n_micro, costs, objective=objective, seconds=min(_PLANNING_S, seconds / 10)
    )
    if plan.is_optimal:
        return plan
    model = _Model(VOrders(n_stage, n_micro, costs), plan)
    left = max(0.01, began + seconds - time.monotonic())
    return model.improved(left, workers)


class _Model:
    """All orders that are no worse than a plan."""

    def __init__(self, orders: VOrders, plan: VPlan) -> None:
        from ortools.sat.python import cp_model

        self.orders, self.plan = orders, plan
        self.unit = _unit([orders.hop, *(one for cost in orders.cost for one in cost)])
        self.cost = [[self._floor(one) for one in cost] for cost in orders.cost]
        self.hop = self._floor(orders.hop)
        self.model: Any = cp_model.CpModel()
        self.horizon = self._ceil(self._latest_end())
        self.start = [
            [
                [self.model.new_int_var(0, self.horizon, "") for _ in range(orders.n_micro)]
                for _ in range(6)
            ]
            for _ in range(orders.n_ranks)
        ]
        self._needs()
        self._hops()
        self._memory()
        self.value = self.model.new_int_var(
            self._floor(plan.lower_bound), self._ceil(plan.value), ""
        )
        self._objective()

    def improved(self, seconds: float, workers: int) -> VPlan:
        """The plan, with what the solver found and proved."""
        from ortools.sat.python import cp_model

        solver, status = solve(self.model, seconds, workers)
        plan = self.plan
        schedule, value = plan.schedule, plan.value
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            order = self._order(solver)
            times = self.orders.times(order)
            if times is not None and all(map(self.orders.is_valid, order)):
                found = times.value(plan.objective)
                if found < value:
                    schedule, value = self.orders.schedule_of(order), found
        bound = plan.lower_bound
        if math.isfinite(solver.best_objective_bound):
            bound = max(bound, math.ceil(solver.best_objective_bound - 1e-6) * self.unit)
        return VPlan(schedule, plan.objective, value, min(bound, value), plan.published)

    def _latest_end(self) -> float:
        """No rank of an order as good as the plan ends later."""
        if self.plan.objective == "makespan":
            return self.plan.value
        heads = first_starts(self.orders)[0]
        return max(map(sum, zip(heads, self.orders.work, strict=True))) + self.plan.value

    def _floor(self, value: float) -> int:
        return math.floor(value / self.unit + 1e-9)

    def _ceil(self, value: float) -> int:
        return math.ceil(value / self.unit - 1e-9)

    def _needs(self) -> None:
        """On a rank: no overlap, microbatches in order, each after what it needs."""
        for starts, cost in zip(self.start, self.cost, strict=True):
            self.model.add_no_overlap(
                self.model.new_fixed_size_interval_var(one, cost[kind], "")
                for kind in range(6)
                for one in starts[kind]
            )
            for kind, need in enumerate(NEEDS):
                for micro, one in enumerate(starts[kind]):
                    if micro:
                        self.model.add(one >= starts[kind][micro - 1] + cost[kind])
                    if need is not None:
                        self.model.add(one >= starts[need][micro] + cost[need])

    def _hops(self) -> None:
        for rank, starts in enumerate(self.start):
            for kind in range(4):
                source = rank + 1 if kind % 2 else rank - 1
                if 0 <= source < len(self.start):
                    arrives = self.cost[source][kind] + self.hop
                    for own, other in zip(starts[kind], self.start[source][kind], strict=True):
                        self.model.add(own >= other + arrives)

    def _memory(self) -> None:
        if math.isinf(self.orders.max_mem):
            return
        unit = _unit([*self.orders.memory, self.orders.max_mem])
        changes = [math.floor(one / unit + 1e-9) for one in self.orders.memory]
        most = math.ceil(self.orders.max_mem / unit - 1e-9)
        m = self.orders.n_micro
        least = 2 * m * sum(min(0, one) for one in changes)
        for starts in self.start:
            times = [one for kind in starts for one in kind]
            self.model.add_reservoir_constraint(
                times, [one for one in changes for _ in range(m)], least, most
            )

    def _objective(self) -> None:
        heads = first_starts(self.orders)[0]
        for rank, (starts, cost) in enumerate(zip(self.start, self.cost, strict=True)):
            free = 0
            if self.plan.objective == "bubble":
                free = self._ceil(heads[rank] + self.orders.work[rank])
            for kind in range(2, 6):
                self.model.add(self.value >= starts[kind][-1] + cost[kind] - free)
        self.model.minimize(self.value)

    def _order(self, solver: Any) -> Order:
        return [
            [
                kind
                for _, kind in sorted(
                    (solver.value(one), kind) for kind in range(6) for one in starts[kind]
                )
            ]
            for starts in self.start
        ]


def _unit(values: Iterable[float]) -> float:
    """1 where all values are integers."""
    values = list(values)
    if all(float(one).is_integer() for one in values):
        return 1
    return max(map(abs, values)) / _STEPS
