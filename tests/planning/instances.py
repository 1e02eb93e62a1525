"""Random loops to plan: tasks, dependences, costs and limits, each derived from a number.

They vary like real loops: chains, layered graphs and loose ones; work on two to five streams and
resources, or on threads alone; short and long recurrences; times that are similar, or differ by a
factor of a hundred; limits from one thread to four.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import Limits


@dataclass(frozen=True)
class Instance:
    """The input of a planner."""

    plan: PipelinePlan
    costs: CostModel
    limits: Limits
    streams: bool


def instance(number: int, size: int = 14, *, tight: bool = False) -> Instance:
    """Return the instance of a number; times are multiples of 10 us, and around 5 ms.

    ``tight`` instances may have two to four iterations in flight, others five.
    """
    rng = random.Random(f"instance {number} of {size}")
    streams = number % 2 == 0
    deps = _deps(rng, size)
    names = [f"t{v:03}" for v in range(size)]
    frozen = _frozen(rng, size)
    queues: list[str | None] = [None, *(f"s{k}" for k in range(rng.randint(1, 4)))]
    resources = [f"r{k}" for k in range(rng.randint(0, 2))]
    where = _places(rng, size, queues)
    collective = set(rng.sample(range(size), rng.choice((0, 0, size // 7, size // 4))))
    plan = PipelinePlan(
        schedule={
            name: TaskSchedule(
                stream=None if v in frozen or not streams else where[v],
                globally_ordered=v in collective,
            )
            for v, name in enumerate(names)
        },
        deps=[(names[c], names[p]) for c, p in deps],
        cross_iter_deps=[(names[c], names[p], d) for c, p, d in _carried(rng, size, frozen)],
    )
    times = _times(rng, size)
    used = {v: (rng.choice(resources),) for v in range(size) if resources and rng.random() < 0.25}
    costs = {
        name: _cost(rng, times[v], streams, used.get(v, ()), v in frozen)
        for v, name in enumerate(names)
    }
    limits = Limits(
        in_flight=rng.choice((2, 3, 4)) if tight else 5,
        groups=rng.choice((1, 2, 2, 3, 4)),
        frozen=[names[v] for v in sorted(frozen)],
    )
    return Instance(plan, CostModel(costs, handover_us=rng.choice((0, 0, 20))), limits, streams)


def held_back(given: Instance, number: int) -> Instance:
    """Return the instance with tasks that block, host-only dependences and another ``run_ahead``.

    If that is unlimited, all work is on the caller's stream.
    """
    rng = random.Random(f"held back {number}")
    costs = {
        name: replace(cost, blocks=rng.random() < 0.2) for name, cost in given.costs.tasks.items()
    }
    plan, ahead = given.plan, rng.choice((None, 0, 1, 2)) if given.streams else None
    if ahead is None:
        plan = replace(
            plan, schedule={name: replace(e, stream=None) for name, e in plan.schedule.items()}
        )
    alone = [pair for pair in plan.deps if rng.random() < 0.2]
    plan = replace(plan, run_ahead=ahead, host_only=alone)
    return replace(given, plan=plan, costs=replace(given.costs, tasks=costs))


def _deps(rng: random.Random, size: int) -> list[tuple[int, int]]:
    """Return (consumer, producer) pairs; producers have the lower number."""
    shape = rng.choice(("chain", "two chains", "layers", "loose"))
    if shape == "chain":
        return [(v, v - 1) for v in range(1, size)]
    if shape == "two chains":
        joined = [(size - 1, size - 2)] if size > 1 else []
        return [(v, v - 2) for v in range(2, size)] + joined
    if shape == "layers":
        width = rng.randint(2, 4)
        return sorted(
            {
                (v, rng.randrange(max(0, (v // width - 1) * width), v // width * width))
                for v in range(width, size)
                for _ in range(rng.randint(1, 2))
            }
        )
    return sorted(
        {(v, rng.randrange(max(0, v - 8), v)) for v in range(1, size) if rng.random() < 0.6}
    )


def _frozen(rng: random.Random, size: int) -> set[int]:
    return set(range(size - rng.randint(1, 4), size)) if rng.random() < 0.5 else set()


def _places(rng: random.Random, size: int, queues: list[str | None]) -> list[str | None]:
    """Return streams in runs: neighbouring tasks often share a stream, as in real loops."""
    places = [rng.choice(queues)]
    while len(places) < size:
        places.append(places[-1] if rng.random() < 0.5 else rng.choice(queues))
    return places


def _carried(rng: random.Random, size: int, frozen: set[int]) -> list[tuple[int, int, int]]:
    """Return (consumer, producer, distance) of dependences between iterations."""
    carried = {
        (rng.randrange(size), rng.randrange(size), rng.choice((1, 1, 1, 2, 3)))
        for _ in range(rng.randint(0, 4))
    }
    if frozen:
        carried.add((min(frozen), max(frozen), 1))
    return sorted(carried)


def _times(rng: random.Random, size: int) -> list[int]:
    spread = rng.choice((0.1, 0.6, 1.4))
    return [max(1, round(rng.lognormvariate(0, spread) * 50)) * 100 for _ in range(size)]


def _cost(
    rng: random.Random, time_us: int, streams: bool, resources: tuple[str, ...], frozen: bool
) -> TaskCost:
    if not streams:
        gil = rng.choice((0, 0, 0, time_us // 10, time_us // 20 * 10))
        return TaskCost(host_us=time_us, gil_us=gil, resources=resources)
    kind = "device" if frozen else rng.choice(("device", "device", "device", "host", "both"))
    if kind == "host":
        return TaskCost(host_us=time_us, resources=resources)
    submission = rng.choice((0, 10, 50)) if kind == "device" else time_us // 20 * 10
    return TaskCost(host_us=submission, device_us=time_us, resources=resources)
