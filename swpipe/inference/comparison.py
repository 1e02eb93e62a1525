"""A plan's dependences beside those that the recorded effects ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from swpipe.analysis.races import demands
from swpipe.core.dependence import Dependence, dependences
from swpipe.core.effects import Conflict, EffectTable, Location, conflicts
from swpipe.core.plan import PipelinePlan
from swpipe.inference.orders import Edge, Orders, declared_edges, edge_of, lane_edges


class Needed(NamedTuple):
    """A dependence that conflicts ask for.

    Attributes:
        distance: In iterations; 0 or 1, unless the plan allows for staleness.
        places: What both tasks touch.
    """

    consumer: str
    producer: str
    distance: int
    places: tuple[Location, ...]

    def __str__(self) -> str:
        pair = f'("{self.consumer}", "{self.producer}")'
        where = "cross_iter_deps" if self.distance else "deps"
        return f"{pair} in {where}, for {_listed(self.places)}"


class Needless(NamedTuple):
    """A declared dependence between tasks that were not seen to touch anything in common.

    Attributes:
        dependence: As declared.
        carries: Conflicts between other tasks are in order only by way of it.
    """

    dependence: Dependence
    carries: bool

    def __str__(self) -> str:
        why = "other tasks are in order only by way of it" if self.carries else "nothing needs it"
        return f"{self.dependence}: {why}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a plan declares against what was recorded.

    Attributes:
        missing: Dependences that the plan must still declare, the fewest: without them tasks may
            touch something in another order than serially.
        by_schedule: Dependences that are not declared, but kept as long as the tasks stay in one
            thread group and on one stream; the fewest.
        needless: Declared between tasks that were not seen to touch anything in common. They may
            stand for something that no recording sees.
    """

    missing: tuple[Needed, ...]
    by_schedule: tuple[Needed, ...]
    needless: tuple[Needless, ...]

    def __str__(self) -> str:
        lines = []
        if self.missing:
            lines += ["missing, declare:", *(f"  {one}" for one in self.missing)]
        else:
            lines += ["no dependence is missing"]
        if self.by_schedule:
            lines += ["not declared, kept by the threads and streams as they are:"]
            lines += [f"  {one}" for one in self.by_schedule]
        if self.needless:
            lines += [
                "declared between tasks that were not seen to touch anything in common",
                "(keep those that stand for what no recording sees):",
                *(f"  {one}" for one in self.needless),
            ]
        return "\n".join(lines)


def compare(plan: PipelinePlan, effects: EffectTable) -> Comparison:
    """Compare a plan that passes ``swpipe.analysis.checks.check`` with the effects of its tasks.

    Staleness that the plan asks for by the name of a state is granted.
    """
    wanted: dict[Edge, list[Conflict]] = defaultdict(list)
    for demand in demands(effects, plan.stale):
        if not demand.either:
            wanted[edge_of(demand.conflict)].append(demand.conflict)
    names = tuple(effects)
    declared = declared_edges(plan)
    orders = Orders(names, declared)
    not_declared = [edge for edge in wanted if not orders.implies(edge)]
    kept = Orders(names, [*declared, *lane_edges(plan)])
    missing = kept.missing(not_declared)
    for edge in missing:
        orders.add(edge)
    return Comparison(
        missing=tuple(_needed(edge, wanted[edge]) for edge in missing),
        by_schedule=tuple(_needed(edge, wanted[edge]) for edge in orders.missing(not_declared)),
        needless=tuple(_needless(plan, names, wanted)),
    )


def needed(effects: EffectTable) -> tuple[Needed, ...]:
    """The fewest dependences that keep all conflicts in their serial order."""
    wanted: dict[Edge, list[Conflict]] = defaultdict(list)
    for conflict in conflicts(effects):
        wanted[edge_of(conflict)].append(conflict)
    edges = Orders(tuple(effects)).missing(wanted)
    return tuple(_needed(edge, wanted[edge]) for edge in edges)


def _needed(edge: Edge, behind: Iterable[Conflict]) -> Needed:
    return Needed(*edge, tuple(conflict.place for conflict in behind))


def _needless(
    plan: PipelinePlan, names: tuple[str, ...], wanted: Iterable[Edge]
) -> Iterable[Needless]:
    within = {edge[:2] for edge in wanted}
    across = {edge[:2] for edge in wanted if edge.distance}
    all_kept = Orders(names, declared_edges(plan))
    kept = [edge for edge in wanted if all_kept.implies(edge)]
    for dep in dependences(plan):
        if dep[:2] in (across if dep.distance > 0 else within):
            continue
        edges = [edge for edge in declared_edges(plan) if edge != dep[:3]]
        without = Orders(names, edges)
        yield Needless(dep, carries=not all(without.implies(edge) for edge in kept))


def _listed(places: Iterable[Location], most: int = 4) -> str:
    texts = [str(place) for place in places]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
