"""Random plans for planners: names, dependences, costs, and the effects of tasks."""

from __future__ import annotations

import random
from dataclasses import dataclass

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.effects import Effects
from swpipe.planning import Limits
from tests.support.safety import effects_of, small_workload
from tests.support.strategies import Workload, dependences_of, random_plan


@dataclass(frozen=True)
class Paper:
    """The input of a planner.

    Attributes:
        plan: A plan that runs.
        costs: The costs of its tasks.
        effects: The effects of the tasks, in serial order; the plan orders all of them.
        limits: Limits that admit the plan.
    """

    plan: PipelinePlan
    costs: CostModel
    effects: dict[str, Effects]
    limits: Limits


def paper(seed: int, most_tasks: int = 6) -> Paper:
    """Return the input of a seed; every second one is a serial step that begins with streams."""
    rng = random.Random(seed)
    workload = small_workload(rng, most_tasks)
    plan = _serial(rng, workload) if seed % 2 else random_plan(rng, workload)
    groups = plan.thread_groups
    limits = Limits(
        in_flight=max(plan.depth, rng.randint(1, 5)), groups=max(len(groups), rng.randint(1, 4))
    )
    return Paper(plan, _costs(rng, plan), effects_of(workload), limits)


def _serial(rng: random.Random, workload: Workload) -> PipelinePlan:
    names = [task.name for task in workload.tasks]
    first_own = rng.randint(0, len(names))
    edges = sorted(dependences_of(workload))
    return PipelinePlan(
        schedule={
            name: TaskSchedule(
                stream=rng.choice(("copy", "dist", "side")) if place < first_own else None,
                globally_ordered=rng.random() < 0.4,
            )
            for place, name in enumerate(names)
        },
        deps=[edge[:2] for edge in edges if not edge.distance],
        cross_iter_deps=[edge for edge in edges if edge.distance],
    )


def _costs(rng: random.Random, plan: PipelinePlan) -> CostModel:
    costs = {}
    for name in plan.schedule:
        host = rng.choice((0, 1, 5, rng.randint(1, 60)))
        resources = [r for r in ("nccl", "pcie") if rng.random() < 0.3]
        costs[name] = TaskCost(
            host_us=host,
            gil_us=rng.choice((0, host / 2, host)),
            device_us=rng.choice((0, rng.randint(1, 100))),
            resources=tuple(resources),
        )
    return CostModel(costs, handover_us=rng.choice((0, 2)))
