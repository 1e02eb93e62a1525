"""Random plans, right and wrong, for random work; and a check of them by exhaustive search.

The effects of a workload's tasks are known (``effects_of``). ``fights`` finds, by exhaustive
exploration, where a plan breaks a serial order that matters. It shares no code with verification.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations

from swpipe import PipelinePlan
from swpipe.analysis import verify
from swpipe.core.effects import Effects, EffectTable, Location
from swpipe.core.plan import PULL
from swpipe.core.resolved import resolve_plan
from swpipe.program import ADMIT, compile_plan
from tests.support.exhaustive import Exhaustive, Run
from tests.support.strategies import Workload, random_plan, random_workload

KINDS = (True, False)
"""Whether a device has streams."""

verify_tasks = partial(verify, pull_ahead=True, body=False)
"""Verifies the tasks alone: the loader is separate, and the loop has no body."""


def small_workload(rng: random.Random, most_tasks: int = 4) -> Workload:
    """Return work whose states have one slot each, as a table of effects assumes."""
    workload = random_workload(rng, most_tasks)
    return replace(workload, slots=dict.fromkeys(workload.slots, 1))


def effects_of(workload: Workload) -> dict[str, Effects]:
    """Return the effects of the tasks, in serial order."""
    table = {}
    for task in workload.tasks:
        states = {Location(use.state, True): use.writes for use in task.states}
        table[task.name] = Effects(
            frozenset({Location(name, False) for name in task.reads} | states.keys()),
            frozenset(
                {Location(name, False) for name in (*task.sets, *task.deletes)}
                | {place for place, writes in states.items() if writes}
            ),
        )
    return table


def with_loader(rng: random.Random, effects: EffectTable) -> dict[str, Effects]:
    """Return the effects with a loader that makes the batch and uses some of the states."""
    states = {place for e in effects.values() for place in e.reads | e.writes if place.persistent}
    used = frozenset(place for place in sorted(states) if rng.random() < 0.3)
    changed = frozenset(place for place in sorted(used) if rng.random() < 0.5)
    batch = Location("batch", persistent=False)
    return {PULL: Effects(used, changed | {batch}), **effects}


def without(plan: PipelinePlan, edge: tuple[str, tuple[object, ...]]) -> PipelinePlan:
    """Return the plan without one entry of one of its lists."""
    key, entry = edge
    return replace(plan, **{key: [other for other in getattr(plan, key) if other != entry]})  # type: ignore[arg-type]


def edges_of(plan: PipelinePlan) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield every dependence that the plan declares, with the name of its list."""
    for key in ("deps", "cross_iter_deps", "same_period_deps"):
        yield from ((key, entry) for entry in getattr(plan, key))


def random_pair(
    seed: int, most_tasks: int = 4, most_workers: int = 1
) -> tuple[PipelinePlan, Workload]:
    """Return work and a plan for it, which lacks none, some or all of the necessary edges."""
    rng = random.Random(seed)
    workload = small_workload(rng, most_tasks)
    plan = random_plan(rng, workload, most_workers)
    lost = rng.choice((0.0, 0.0, 0.3, 1.0))
    for edge in list(edges_of(plan)):
        if rng.random() < lost:
            plan = without(plan, edge)
    return plan, workload


# ----------------------------------------------------------------------------- by trying everything


def orders(
    plan: PipelinePlan, iterations: int, *, streams: bool, most: int = 2_000, loader: bool = True
) -> dict[Run, frozenset[Run]]:
    """Return, for each run of a task, the runs that always come before it."""
    program = compile_plan(resolve_plan(plan), streams=streams)
    found = Exhaustive(program, iterations, streams=streams, most=most, loader=loader)
    before = found.host_before
    if streams:
        before = {run: before[run] & found.device_before[run] for run in found.device_before}
    if plan.pull_group is None:  # <admit> calls the loader

        def puller(run: Run) -> Run:
            return (PULL, run[1]) if run[0] == ADMIT else run

        before = {puller(run): frozenset(map(puller, of)) for run, of in before.items()}
    return before


def meetings(effects: EffectTable, iterations: int) -> Iterator[tuple[Run, Run, Location]]:
    """Yield every two runs that access one location, one of them writing, in serial order.

    Each iteration has its own attributes.
    """
    runs = [(task, i) for i in range(iterations) for task in effects]
    for first, then in combinations(runs, 2):
        a, b = effects[first[0]], effects[then[0]]
        places = (a.reads & b.writes) | (a.writes & b.reads) | (a.writes & b.writes)
        for place in places:
            if place.persistent or first[1] == then[1]:
                yield first, then, place


def fights(
    plan: PipelinePlan,
    effects: EffectTable,
    *,
    streams: bool,
    iterations: tuple[int, ...] = (1, 2),
    most: int = 2_000,
) -> set[frozenset[str]]:
    """Return the pairs of tasks that do not always run in serial order, in runs of such length.

    Raises:
        TooManyError: A run has more than ``most`` states.
    """
    found = set()
    for count in iterations:
        before = orders(plan, count, streams=streams, most=most, loader=PULL in effects)
        for first, then, _ in meetings(effects, count):
            if first not in before[then]:
                found.add(frozenset({first[0], then[0]}))
    return found


def is_as_stale_as_allowed(
    plan: PipelinePlan, effects: EffectTable, *, streams: bool, iterations: tuple[int, ...]
) -> bool:
    """Return whether reads are shifted as ``stale`` and ``newer`` allow, and always equally."""
    table = list(effects)
    for count in iterations:
        before = orders(plan, count, streams=streams)
        for first, then, place in meetings(effects, count):
            # Only a task that only reads may find a state shifted: older where it is serially the
            # second of the two, newer where it is the first.
            shift = 0
            if place.persistent and place not in effects[then[0]].writes:
                shift = plan.stale.get(place.name, 0)
            elif place.persistent and place not in effects[first[0]].writes:
                shift = plan.newer.get(place.name, 0)
            apart = then[1] - first[1] - (table.index(first[0]) > table.index(then[0]))
            kept = first in before[then]
            turned = then in before[first]
            if not (kept or (turned and apart < shift)):
                return False
    return True
