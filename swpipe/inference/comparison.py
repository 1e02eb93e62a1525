"""Comparison of a plan's dependences with those that the recorded effects require."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from swpipe.analysis.races import guarantees, required_orders, violations
from swpipe.core.effects import Conflict, EffectTable, Location, conflicts
from swpipe.core.messages import listed
from swpipe.core.resolved import ResolvedPlan
from swpipe.inference.orders import Edge, Orders, edge_of


class Needed(NamedTuple):
    """A dependence that conflicts require.

    Attributes:
        distance: In iterations; 0 or 1, unless the plan allows for staleness.
        places: The locations that both tasks access.
    """

    consumer: str
    producer: str
    distance: int
    places: tuple[Location, ...]

    def __str__(self) -> str:
        where = "cross_iter_deps" if self.distance else "deps"
        places = listed([str(place) for place in self.places], most=4)
        return f'("{self.consumer}", "{self.producer}") in {where}, for {places}'


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plan's declarations against what was recorded.

    Attributes:
        missing: The fewest dependences that the plan must still declare: without them, tasks may
            access a location in an order other than the serial one.
        by_schedule: The fewest dependences that are not declared, but kept by the plan's threads,
            streams, global order and depth.
    """

    missing: tuple[Needed, ...]
    by_schedule: tuple[Needed, ...]

    def __str__(self) -> str:
        lines = []
        if self.missing:
            lines += ["missing, declare:", *(f"  {entry}" for entry in self.missing)]
        else:
            lines += ["no dependence is missing"]
        if self.by_schedule:
            lines += ["not declared, kept by the schedule as it is:"]
            lines += [f"  {entry}" for entry in self.by_schedule]
        return "\n".join(lines)


def compare_with_plan(resolved: ResolvedPlan, effects: EffectTable) -> Comparison:
    """Compare a validated plan with the effects of its tasks, on both kinds of device.

    A conflict that the plan allows by ``stale`` or ``newer`` needs no dependence.
    """
    wanted: dict[Edge, list[Conflict]] = defaultdict(list)
    required = tuple(required_orders(effects, resolved.plan.stale, resolved.plan.newer))
    for conflict, *_ in required:
        wanted[edge_of(conflict)].append(conflict)
    # A conflict whose opposite order is just as good, or of which one side is seeded for itself,
    # asks for no dependence.
    certain = dict.fromkeys(
        edge_of(each.conflict) for each in required if not (each.either or each.seeded)
    )
    # Both with streams and without (CPU): a plan has to be correct on either kind of device.
    before = guarantees(resolved, streams=None)
    broken = {
        Edge(each.consumer, each.producer, each.distance) for each in violations(required, before)
    }
    names = tuple(effects)
    known = Orders(names)
    if broken:  # these may follow from kept orders
        # The kept orders join the closure, so that only edges that do not follow from them are
        # reported.
        pairs = (Edge(c, p, d) for c, p in permutations(names, 2) for d in (0, 1))
        known.missing(e for e in pairs if all(b.keeps(e[1], e[0], e[2]) for b in before))
    missing = known.missing(broken)
    orders = Orders(names, [*(Edge(*dep[:3]) for dep in resolved.dependences), *missing])
    by_schedule = orders.missing([edge for edge in certain if edge not in broken])
    return Comparison(
        missing=tuple(_needed(edge, wanted[edge]) for edge in missing),
        by_schedule=tuple(_needed(edge, wanted[edge]) for edge in by_schedule),
    )


def needed(effects: EffectTable) -> tuple[Needed, ...]:
    """Return the fewest dependences that keep all conflicts in their serial order."""
    wanted: dict[Edge, list[Conflict]] = defaultdict(list)
    for conflict in conflicts(effects):
        wanted[edge_of(conflict)].append(conflict)
    edges = Orders(tuple(effects)).missing(wanted)
    return tuple(_needed(edge, wanted[edge]) for edge in edges)


def _needed(edge: Edge, behind: Iterable[Conflict]) -> Needed:
    """Return an edge as a dependence, with the locations of the conflicts behind it."""
    return Needed(*edge, tuple(conflict.place for conflict in behind))
