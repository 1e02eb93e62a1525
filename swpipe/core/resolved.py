"""A plan with its dependences and orders, which are derived once and passed on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swpipe.core.dependence import Dependence, topological
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan, StreamRef, streams_of


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    """A plan, its dependences and its two orders.

    Attributes:
        plan: The plan.
        dependences: All that the plan declares, each with distance and lag; no duplicates.
        period_order: An order of the tasks within a period; every edge of lag 0 points backwards.
        serial_order: The order of a serial run.
    """

    plan: PipelinePlan
    dependences: tuple[Dependence, ...]
    period_order: tuple[str, ...]
    serial_order: tuple[str, ...]


def resolve_plan(plan: PipelinePlan, names: Iterable[str] | None = None) -> ResolvedPlan:
    """Derive the dependences and orders of a plan, without checking all of its rules.

    ``swpipe.analysis.validation.validate`` checks them as well.

    Args:
        plan: The plan.
        names: Its tasks in the order in which they were given; None is the schedule's order.

    Raises:
        KeyError: A dependence or the order has a name that the schedule does not have.
        CycleError: The dependences within an iteration or a period form a cycle, or the plan's
            ``order`` contradicts them.
    """
    deps = dependences_of(plan)
    # The order given, as far as the dependences within an iteration allow.
    rank = {name: (place,) for place, name in enumerate(plan.schedule if names is None else names)}
    serial = topological(rank, [dep[:2] for dep in deps if dep.distance == 0])
    return ResolvedPlan(plan, deps, _period_order(plan, deps), tuple(serial))


def dependences_of(plan: PipelinePlan) -> tuple[Dependence, ...]:
    """Return every dependence that a plan declares, also for plans that may have no order."""
    stage = {name: entry.stage for name, entry in plan.schedule.items()}
    declared = [(c, p, 0, "deps") for c, p in plan.deps]
    declared += [(c, p, d, "cross_iter_deps") for c, p, d in plan.cross_iter_deps]
    # The tasks of a same-period edge differ by their stages: distance = s(producer) - s(consumer)
    # makes the lag 0.
    declared += [(c, p, stage[p] - stage[c], "same_period_deps") for c, p in plan.same_period_deps]
    unique: dict[tuple[str, str, int], Dependence] = {}
    alone = frozenset(plan.host_only)
    # The first declaration of an edge counts; its source is the one in messages.
    for c, p, d, source in declared:
        lag = stage[c] - stage[p] + d
        unique.setdefault((c, p, d), Dependence(c, p, d, lag, source, (c, p) in alone))
    return tuple(unique.values())


def _period_order(plan: PipelinePlan, dependences: Sequence[Dependence]) -> tuple[str, ...]:
    """Return a topological order of the edges of lag 0.

    Where the edges leave a choice, these rules decide, the first one first:

    1. ``plan.order``;
    2. tasks that take turns with older iterations, and whose input may be late, come last;
    3. worker groups before the default group: a collective of the next batch whose input exists
       comes before this batch's backward, and overlaps with it;
    4. higher stages first: the oldest iteration does not wait for a newer one;
    5. the order of declaration.
    """
    edges = [dep[:2] for dep in dependences if dep.lag == 0]
    late = _late(plan, edges)
    rank = {
        name: (name in late, entry.thread_group == DEFAULT_GROUP, -entry.stage, index)
        for index, (name, entry) in enumerate(plan.schedule.items())
    }
    ties = [(later, sooner) for sooner, later in pairwise(plan.order)]
    return tuple(topological(rank, [*edges, *ties]))


def _late(plan: PipelinePlan, edges: Iterable[tuple[str, str]]) -> set[str]:
    """Return the tasks that would keep an older iteration waiting for a newer one's input.

    Such a task takes turns, in global order or on a named stream, with a task of another thread
    that works on an older iteration; and its own input is made in the same period. If it came
    first, training would wait for the next batch to be read.
    """
    schedule = plan.schedule
    # An edge of lag 0 from the same stage or an earlier one brings an input of this iteration or a
    # newer one; from a later stage, it orders the task after an older iteration.
    fed = {c for c, p in edges if schedule[p].stage <= schedule[c].stage}
    ordered = [name for name, entry in schedule.items() if entry.globally_ordered]
    by_stream: dict[StreamRef, list[str]] = defaultdict(list)
    for name, entry in schedule.items():
        by_stream[entry.stream].append(name)
    late: set[str] = set()
    for names in (ordered, *[by_stream[stream] for stream in streams_of(schedule.values())]):
        entries = [schedule[name] for name in names]
        late |= {
            name
            for name, own in zip(names, entries, strict=True)
            if name in fed
            and any(e.stage > own.stage and e.thread_group != own.thread_group for e in entries)
        }
    return late
