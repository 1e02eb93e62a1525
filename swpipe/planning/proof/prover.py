"""How good a plan is: the least interval proved, or the gap that is left.

Needs OR-Tools: ``pip install 'swpipe[optimum]'``. It takes seconds to minutes where planning takes
milliseconds, and is for judging plans, not for making them; a better plan that it comes upon is
handed back all the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swpipe._solver import require_ortools
from swpipe.core.costs import CostModel
from swpipe.core.plan import PipelinePlan
from swpipe.planning.limits import Limits
from swpipe.planning.modulo.auto import auto_plan
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule
from swpipe.planning.modulo.schedule_graph import TOLERANCE, schedule_graph
from swpipe.planning.modulo.search import Found, Search
from swpipe.planning.proof.constraint_model import ConstraintModel


@dataclass(frozen=True, slots=True)
class Proof:
    """The best plan known, and what no plan can beat.

    Attributes:
        plan: The best plan known: that of ``auto_plan``, or a better one.
        ii_us: Its interval, as the simulator has it; microseconds.
        bound_us: No plan within the limits has a shorter interval.
        planned_us: The interval of ``auto_plan``'s plan.
        resolution_us: Times were rounded down to this; intervals nearer than it are one.
    """

    plan: PipelinePlan
    ii_us: float
    bound_us: float
    planned_us: float
    resolution_us: float

    @property
    def optimal(self) -> bool:
        """Whether the plan is proved to be the best, to the resolution."""
        return self.ii_us <= self.bound_us * (1 + TOLERANCE) + self.resolution_us

    @property
    def gap(self) -> float:
        """How much better a plan might be at most; 0.01 is 1%."""
        return self.ii_us / self.bound_us - 1 if self.bound_us else 0.0


def prove(
    plan: PipelinePlan,
    costs: CostModel,
    *,
    limits: Limits | None = None,
    streams: bool = True,
    seconds: float = 30.0,
    resolution_us: float = 1.0,
    workers: int = 1,
) -> Proof:
    """Prove the least interval, or how far from it the planner's plan is at most.

    Args:
        plan: As for ``auto_plan``.
        costs: A cost for each task.
        limits: What plans must keep to; None for ``Limits()``.
        streams: Whether the device has streams.
        seconds: For the solver in all; what is not proved by then is left as a gap.
        resolution_us: The solver's unit of time.
        workers: Threads of the solver.

    Raises:
        PlanError: As for ``auto_plan``.
        ImportError: OR-Tools is not installed.
        ValueError: ``seconds`` or ``resolution_us`` is not above 0.
    """
    if not seconds > 0 or not resolution_us > 0:
        raise ValueError(
            f"seconds is {seconds}, resolution_us is {resolution_us}: both must be above 0"
        )
    require_ortools()
    limits = limits if limits is not None else Limits()
    choice = auto_plan(plan, costs, limits=limits, streams=streams)
    graph = schedule_graph(plan, costs, limits, streams=streams)
    search = Search(plan, costs, graph)
    best, ii_us = choice.plan, choice.ii_us
    bound_us = max(choice.bounds.ii_us, search.bound_us(limits.threads, limits.in_flight))
    low, high = _units(bound_us, resolution_us), _units(ii_us, resolution_us)
    period = high - 1  # most often the plan is the best already
    while low <= period < high:
        model = ConstraintModel(graph, period, limits.threads, limits.in_flight, resolution_us)
        possible, schedule = model.solve(seconds / 4, workers)
        if possible is None:
            break
        if schedule is None:
            low, bound_us = period + 1, max(bound_us, period * resolution_us)
        else:
            high = period
            found = _shallowest(search, schedule, limits.in_flight)
            if found is not None and found.ii_us < ii_us * (1 - TOLERANCE):
                best, ii_us = found.plan, found.ii_us
        period = (low + high) // 2
    return Proof(best, ii_us, min(bound_us, ii_us), choice.ii_us, resolution_us)


def _shallowest(search: Search, schedule: ModuloSchedule, depth: int) -> Found | None:
    """The best plan of a schedule, with as few iterations in flight as that takes."""
    best, schedule = None, schedule.from_stage_0()
    for in_flight in range(max(schedule.stage) + 1, depth + 1):
        found = search.simulated(schedule, in_flight)
        if found is not None and found.beats(best):
            best = found
    return best


def _units(us: float, unit_us: float) -> int:
    return math.ceil(us / unit_us - 1e-6)
