"""Whether a plan keeps the serial order wherever tasks conflict, in every interleaving.

``demands`` says which orders must be kept, from what tasks touch; ``order_problems`` compares them
with what the compiled plan makes sure of (``swpipe.analysis.happens_before``).

**What is demanded.** Every conflict (``swpipe.core.effects``) in serial order, at distances 0 and
1.
Those further apart follow: of the two tasks of a conflict, A and then B, one writes, and so is in
conflict with itself at distance 1. If that is A, then A on i comes before A on i + 1 and so on, and
the last of these before B; if it is B, then A comes before the first B, and that before the next.
All iterations between two that exist exist, so each step of this holds wherever it is needed.

**Staleness on purpose.** ``PipelinePlan.stale`` allows tasks that read a state and do not write it
to find it as it was up to k iterations before. Then the serial order of write before read is
demanded from k iterations further apart on. Nearer by either order will do, but one of them must be
kept in every interleaving: what is read must not depend on luck. All else is demanded as before:
writers keep their serial order, and nobody reads what a serial run would write only later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from swpipe.analysis.happens_before import HappensBefore
from swpipe.core.dependence import CycleError, period_order, serial_order
from swpipe.core.drawing import format_grid
from swpipe.core.effects import Conflict, Effects, EffectTable, conflicts, declared_effects
from swpipe.core.errors import PlanError, Problem
from swpipe.core.plan import PipelinePlan, StreamRef
from swpipe.core.task import PipelineTask

SHOWN_PLACES = 4
"""Of the places that two tasks fight over, so many are named in a message."""


class Demand(NamedTuple):
    """An order that must be kept in every interleaving.

    Attributes:
        conflict: The consumer on iteration i comes after the producer on iteration i - distance.
        either: The other order will do as well, as long as it is always the same one.
    """

    conflict: Conflict
    either: bool


def demands(effects: EffectTable, stale: Mapping[str, int]) -> Iterator[Demand]:
    """Every order that must be kept; ``effects`` is in serial order."""
    names = list(effects)
    for conflict in conflicts(effects):
        consumer, producer, distance, place, _ = conflict
        behind = stale.get(place.name, 0) if place.persistent else 0
        only_reads = place not in effects[consumer].writes
        if not (behind and only_reads):
            yield Demand(conflict, either=False)
        elif distance == 0 or names.index(producer) > names.index(consumer):
            # At the least distance of a write that a serial run reads; all further ones follow.
            for further in range(behind):
                yield Demand(conflict._replace(distance=distance + further), either=True)
            yield Demand(conflict._replace(distance=distance + behind), either=False)


def order_problems(
    plan: PipelinePlan, effects: EffectTable, *, streams: bool | None = None
) -> list[Problem]:
    """Every demand that some interleaving of the plan breaks, with the edge that would mend it.

    Args:
        plan: ``swpipe.analysis.checks.check`` finds nothing wrong with it.
        effects: What each task touches, in serial order; tasks that touch nothing may be left out.
        streams: Whether the device has streams; None asks for both kinds of device.

    Returns:
        One problem for each pair of tasks and distance.
    """
    kinds = (True, False) if streams is None else (streams,)
    return [
        Problem(
            _text(plan, effects, breach, len(breach.kinds) < len(kinds)),
            (breach.consumer, breach.producer),
        )
        for breach in _breaches(plan, effects, kinds)
    ]


def stale_problems(plan: PipelinePlan, effects: EffectTable) -> list[Problem]:
    """States that ``plan.stale`` names and no task touches."""
    touched = {p.name for e in effects.values() for p in e.reads | e.writes if p.persistent}
    known = ", ".join(sorted(touched)) or "none"
    return [
        Problem(
            f"stale names state {state!r}, which no task touches (touched are: {known}): correct "
            "the name, or take it out"
        )
        for state in plan.stale
        if state not in touched
    ]


def serial_effects(plan: PipelinePlan, effects: EffectTable) -> dict[str, Effects]:
    """The table in the order in which a pipeline with this plan would run the tasks serially.

    Args:
        plan: Names every task of the table.
        effects: In the order in which the tasks were given.
    """
    missing = [name for name in plan.schedule if name not in effects]
    order = serial_order(plan, [*effects, *missing])
    return {name: effects.get(name, Effects()) for name in order}


def check_states(plan: PipelinePlan, tasks: Sequence[PipelineTask], *, streams: bool) -> None:
    """Refuse a plan under which tasks could touch the states that they declare out of order.

    Args:
        plan: ``swpipe.analysis.checks.check`` finds nothing wrong with it.
        tasks: In serial order.
        streams: Whether the device has streams.

    Raises:
        PlanError: Lists each pair of tasks, with the edge that would mend it.
    """
    if problems := order_problems(plan, declared_effects(tasks), streams=streams):
        raise refusal(plan, problems)


def refusal(plan: PipelinePlan, problems: Sequence[Problem]) -> PlanError:
    """The error that refuses a plan, with the grid of its steady state drawn."""
    faulty = {name for problem in problems for name in problem.tasks}
    periods = min(plan.max_stage, 20) + 3
    return PlanError(problems, format_grid(plan, list(plan.schedule), periods, faulty=faulty))


@dataclass(frozen=True, slots=True)
class _Order:
    """What one kind of device keeps."""

    before: HappensBefore
    streams: bool

    def keeps(self, first: str, then: str, distance: int) -> bool:
        """On the host and, where it has streams, on the device."""
        on_host = self.before.host(first, then, distance)
        return on_host and (not self.streams or self.before.device(first, then, distance))


@dataclass(slots=True)
class _Breach:
    """A demand that is not kept: over which places, and on which kinds of device.

    Attributes:
        turned: The other order is kept in every interleaving.
        either: Any order would do.
        kinds: Whether these devices have streams.
        conflicts: All between these two at this distance.
    """

    consumer: str
    producer: str
    distance: int
    turned: bool = True
    either: bool = True
    kinds: dict[bool, None] = field(default_factory=dict)
    conflicts: dict[Conflict, None] = field(default_factory=dict)


def _breaches(plan: PipelinePlan, effects: EffectTable, kinds: Iterable[bool]) -> list[_Breach]:
    """Every demand that is not kept on some of these kinds of device."""
    found: dict[tuple[str, str, int], _Breach] = {}
    wanted = tuple(demands(effects, plan.stale))
    for kind in kinds if wanted else ():
        order = _Order(HappensBefore.of(plan, streams=kind), kind)
        for conflict, either in wanted:
            after, before, distance, _, _ = conflict
            if order.keeps(before, after, distance):
                continue
            turned = order.keeps(after, before, -distance)
            if either and turned:
                continue
            key = (after, before, distance)
            breach = found.setdefault(key, _Breach(*key))
            breach.turned &= turned
            breach.either &= either
            breach.kinds[kind] = None
            breach.conflicts[conflict] = None
    return list(found.values())


# --------------------------------------------------------------------------------------- in words


def _text(plan: PipelinePlan, effects: EffectTable, breach: _Breach, say_where: bool) -> str:
    """What is wrong, over what, and what would mend it."""
    consumer = f"{breach.consumer!r} on iteration i"
    producer = f"{breach.producer!r} on iteration {_iteration(breach.distance)}"
    places = [f"{c.place} ({c.hazard})" for c in breach.conflicts]
    more = f" and {len(places) - SHOWN_PLACES} more" if len(places) > SHOWN_PLACES else ""
    where = _where(plan, breach) if say_where else ""
    what = f"both touch {', '.join(places[:SHOWN_PLACES])}{more}"
    if breach.either:
        return (
            f"{where}{consumer} comes now before, now after {producer}, and {what}: stale reads "
            f"are allowed, but must be the same in every run: {_mend(plan, breach)}"
            f"{_mend_turned(plan, breach)}"
        )
    fault = "always comes before it" if breach.turned else "may come before it"
    return (
        f"{where}{consumer} must come after {producer}, but {fault}, and {what}: "
        f"{_mend(plan, breach)}{_meant(plan, effects, breach)}"
    )


def _iteration(distance: int) -> str:
    return f"i - {distance}" if distance else "i"


def _where(plan: PipelinePlan, breach: _Breach) -> str:
    if True not in breach.kinds:
        return "on a device without streams, such as the CPU: "
    of = [plan.schedule[name].stream for name in (breach.producer, breach.consumer)]
    return f"on a device with streams (here {_name(of[0])} and {_name(of[1])}): "


def _name(stream: StreamRef) -> str:
    return "the caller's" if stream is None else repr(stream)


def _mend(plan: PipelinePlan, breach: _Breach) -> str:
    """The edge to add or, where it could not be kept, what stands in its way."""
    consumer, producer, distance = breach.consumer, breach.producer, breach.distance
    stage = {name: plan.schedule[name].stage for name in (consumer, producer)}
    edge = _edge(consumer, producer, distance)
    if stage[consumer] - stage[producer] + distance < 0:
        return (
            f"move {consumer!r} from stage {stage[consumer]} to {stage[producer] - distance} or "
            f"later, or {producer!r} from stage {stage[producer]} to {stage[consumer] + distance} "
            f"or earlier, and add {edge}"
        )
    if distance:
        far = (consumer, producer, distance)
        changed = replace(plan, cross_iter_deps=[*plan.cross_iter_deps, far])
    else:
        changed = replace(plan, deps=[*plan.deps, (consumer, producer)])
    try:
        period_order(changed)
    except CycleError as error:
        cycle = " after ".join(repr(name) for name in error.cycle)
        return (
            f"to add {edge} would make a cycle ({cycle}): take out what puts {consumer!r} first, "
            f"or move {consumer!r} to stage {stage[consumer] + 1} or later, and add it"
        )
    return f"add {edge}"


def _mend_turned(plan: PipelinePlan, breach: _Breach) -> str:
    """How to make sure of the other order, where the two meet in one period."""
    reader, writer = breach.consumer, breach.producer
    apart = plan.schedule[writer].stage - plan.schedule[reader].stage
    if breach.distance == 0 or apart != breach.distance:
        return ""
    return f'; or, to read the older one, add same_period_deps=[("{writer}", "{reader}")]'


def _meant(plan: PipelinePlan, effects: EffectTable, breach: _Breach) -> str:
    """How to allow it, where what is read is old, but always equally old."""
    if not (breach.turned and all(c.place.persistent for c in breach.conflicts)):
        return ""  # to allow staleness would not help
    pair = {name: effects[name] for name in effects if name in (breach.consumer, breach.producer)}
    for behind in range(1, plan.depth + 1):
        stale = {conflict.place.name: behind for conflict in breach.conflicts}
        if not _breaches(replace(plan, stale={**plan.stale, **stale}), pair, breach.kinds):
            return f"; or, if reads may be {behind} behind, say stale={stale}"
    return ""


def _edge(consumer: str, producer: str, distance: int) -> str:
    """A line to paste."""
    if distance == 0:
        return f'deps=[("{consumer}", "{producer}")]'
    return f'cross_iter_deps=[("{consumer}", "{producer}", {distance})]'
