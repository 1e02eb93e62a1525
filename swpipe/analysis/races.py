"""The orders that conflicting tasks require, and whether a plan keeps them in every interleaving.

``required_orders`` derives the orders that must be kept from the effects of tasks; ``violations``
compares them with the orders that the compiled plan keeps (``swpipe.analysis.happens_before``).

**Required orders.** Every conflict (``swpipe.core.effects``) in serial order, at distances 0 and 1.
Larger distances follow: of the two tasks of a conflict, A and then B, one writes, and so conflicts
with itself at distance 1. If A writes, A on i comes before A on i + 1 and so on, and the last of
these before B; if B writes, A comes before the first B, and that before the next. All iterations
between two existing iterations exist, so each step holds wherever it is needed.

**Intended shifts.** ``PipelinePlan.stale`` allows tasks that only read a state to find it as it was
up to k iterations before. The serial order of write before read is then required from k iterations
further apart. At smaller distances either order is allowed, but it must be the same in every
interleaving: the value that is read must not depend on timing. ``PipelinePlan.newer`` allows the
same for the serial order of read before write. Every other order is required as without shifts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple

from swpipe.analysis.happens_before import HappensBefore
from swpipe.core.dependence import CycleError, ProposedEdge, ProposedStage
from swpipe.core.drawing import stream_name
from swpipe.core.effects import (
    DRAWS,
    UNDECLARED,
    Conflict,
    Effects,
    EffectTable,
    Location,
    conflicts,
)
from swpipe.core.messages import listed, shown
from swpipe.core.plan import (
    BODY,
    DEFAULT_GROUP,
    OTHERS,
    PULL,
    PipelinePlan,
    TaskSchedule,
    is_host,
)
from swpipe.core.resolved import ResolvedPlan, resolve_plan
from swpipe.errors import Problem

SHOWN_PLACES = 4
"""The maximum number of shared locations that a message names."""

MOST_EXPLAINED = 100
"""The maximum number of violations with a proposed mend; each mend resolves the plan once more."""


class RequiredOrder(NamedTuple):
    """An order that must be kept in every interleaving.

    Attributes:
        conflict: Consumer, producer and distance.
        either: Whether the opposite order is allowed, too, if it is kept in every interleaving.
        seeded: Whether it is enough that the two never run at the same time, since one of them is
            seeded by itself.
    """

    conflict: Conflict
    either: bool
    seeded: bool = False


@dataclass(slots=True)
class Violation:
    """A required order that some interleaving breaks.

    Attributes:
        consumer: The task that must come later.
        producer: The task that must come first.
        distance: The difference of their iterations.
        reversed: Whether the opposite order is kept in every interleaving.
        either: Whether any order is allowed that is kept in every interleaving.
        devices: The kinds of device on which the order breaks: True for devices with streams.
        conflicts: All conflicts between these two tasks at this distance.
    """

    consumer: str
    producer: str
    distance: int
    reversed: bool = True
    either: bool = True
    devices: dict[bool, None] = field(default_factory=dict)
    conflicts: dict[Conflict, None] = field(default_factory=dict)


def required_orders(
    effects: EffectTable, stale: Mapping[str, int], newer: Mapping[str, int]
) -> list[RequiredOrder]:
    """Return every order that must be kept.

    Args:
        effects: Task name to its effects, in serial order.
        stale: ``PipelinePlan.stale``.
        newer: ``PipelinePlan.newer``.
    """
    place_of = {name: place for place, name in enumerate(effects)}
    required: list[RequiredOrder] = []
    for conflict in conflicts(effects):
        consumer, producer, distance, location, _ = conflict
        # If both write, no shift applies: only a task that reads may find another value.
        readers = [n for n in (consumer, producer) if location not in effects[n].writes]
        shift = 0
        # A reader that comes second would find the state older, one that comes first, newer.
        if readers and location.persistent:
            shift = (stale if consumer in readers else newer).get(location.name, 0)
        # Two random tasks both read DRAWS and have no conflict; a writer may draw at any moment.
        if location == DRAWS and readers:
            required.append(RequiredOrder(conflict, either=False, seeded=True))
        elif not shift:
            required.append(RequiredOrder(conflict, either=False))
        elif distance == 0 or place_of[producer] > place_of[consumer]:
            # Begin at the least distance at which the two meet serially; the larger ones follow.
            for further in range(shift):
                nearer = conflict._replace(distance=distance + further)
                required.append(RequiredOrder(nearer, either=True))
            far = conflict._replace(distance=distance + shift)
            required.append(RequiredOrder(far, either=False))
    return required


def guarantees(resolved: ResolvedPlan, streams: bool | None) -> tuple[HappensBefore, ...]:
    """Return the orders that a plan keeps, by kind of device.

    Args:
        resolved: A validated plan.
        streams: Whether the device has streams; None for both kinds.
    """
    kinds = (True, False) if streams is None else (streams,)
    return tuple(HappensBefore.of(resolved, streams=kind) for kind in kinds)


def violations(
    required: Iterable[RequiredOrder], guaranteed: Iterable[HappensBefore]
) -> list[Violation]:
    """Return the orders that some interleaving breaks, one for each pair of tasks and distance."""
    required = tuple(required)
    broken: dict[tuple[str, str, int], Violation] = {}
    for before in guaranteed:
        # The same question comes up for each location that two tasks share: it is asked once.
        on_host = cache(before.host)
        on_device = cache(before.keeps)
        for conflict, either, seeded in required:
            consumer, producer, distance = key = conflict[:3]
            of_device = partial(on_device, attribute=not conflict.place.persistent)
            keeps = on_host if conflict.place.on_host else of_device
            if keeps(producer, consumer, distance):
                continue
            if seeded and before.never_beside(producer, consumer, distance):
                continue
            reverse = keeps(consumer, producer, -distance)
            if either and reverse:
                continue
            # An order may break on one kind of device only: violations of both kinds are merged.
            violation = broken.setdefault(key, Violation(*key))
            violation.reversed &= reverse
            violation.either &= either
            violation.devices[before.streams] = None
            violation.conflicts[conflict] = None
    return list(broken.values())


def race_problems(
    effects: EffectTable, guaranteed: Sequence[HappensBefore], *, beside_body: bool = False
) -> list[Problem]:
    """Return a problem for every required order that a plan breaks, with the edge that restores it.

    Args:
        effects: The effects in serial order, with those of the loop's body and loader if they
            matter.
        guaranteed: The orders that the validated plan keeps, on each kind of device that matters.
        beside_body: Whether to ask only for orders between a task and the body.
    """
    plan = guaranteed[0].plan
    required = required_orders(effects, plan.stale, plan.newer)
    # The orders of the loader are checked before the run: they do not depend on the body.
    if beside_body:
        required = [
            order
            for order in required
            if BODY in order.conflict[:2] and PULL not in order.conflict[:2]
        ]
    broken = violations(required, guaranteed)
    problems = _beside_the_others(plan, effects, broken)
    # Undeclared code is reported once, and not with each task that it conflicts with.
    tasks = (name for problem in problems for name in problem.tasks)
    reported = {name for name in tasks if effects[name].undeclared}
    between = [
        violation
        for violation in broken
        if reported.isdisjoint(both := {violation.consumer, violation.producer})
        and (BODY not in both or PULL in both)
    ]
    for number, violation in enumerate(between):
        pair = (violation.consumer, violation.producer)
        # Each proposal resolves a changed plan, which takes too long for very many violations.
        if number >= MOST_EXPLAINED:
            text = f"{pair[0]!r} and {pair[1]!r} may run in the wrong order: mend the others first"
            problems.append(Problem(text, pair))
            continue
        table = {name: touched for name, touched in effects.items() if name in pair}
        # The kind of device is named only if the plan keeps the order on another kind.
        failing = [order for order in guaranteed if order.streams in violation.devices]
        where = _where(plan, violation) if len(failing) < len(guaranteed) else ""
        mend = _mend(plan, violation)
        text = where + _text(violation, mend.text) + _meant(plan, table, violation, failing)
        problems.append(replace(mend, text=text))
    return problems


def proves(effects: EffectTable, before: HappensBefore) -> bool:
    """Return whether a plan gives the serial numbers if tasks touch only ``effects`` and contexts.

    It does if no order is broken although every task may read and write the whole context.
    Undeclared tasks elsewhere than beside the loop's body count as not proved.
    """
    plan = before.plan
    # Beside the body: last stage, caller's thread and stream. There, program order is serial.
    undeclared = [plan.schedule[n] for n in effects if effects[n].undeclared]
    beside = TaskSchedule(plan.max_stage)
    if any(replace(entry, globally_ordered=False) != beside for entry in undeclared):
        return False
    # One location stands for all attributes, so that each task conflicts with every other one.
    whole = Effects(*[frozenset([Location("the context", False)])] * 2)
    # Only tasks use the context: the loader runs before it exists, the body after the tasks.
    table = {n: e if n in OTHERS else e | whole for n, e in effects.items()}
    return not violations(required_orders(table, plan.stale, plan.newer), [before])


def _beside_the_others(
    plan: PipelinePlan, effects: EffectTable, broken: Iterable[Violation]
) -> list[Problem]:
    """Return problems of tasks that may run before the loop's body, and of batches pulled ahead."""
    pulled = False
    undeclared = dict.fromkeys(_undeclared_apart(plan, effects))
    shared: dict[str, dict[Location, None]] = {}
    for violation in broken:
        pair = {violation.consumer, violation.producer}
        if PULL in pair:
            pulled |= effects[PULL].undeclared
        elif BODY in pair:
            # An undeclared task is itself at fault; of a declared one, the shared states are.
            (task,) = pair - {BODY}
            if effects[task].undeclared:
                undeclared[task] = None
            else:
                shared.setdefault(task, {}).update(
                    dict.fromkeys(c.place for c in violation.conflicts)
                )
    problems = [Problem(f"the effects of the loader are not declared, {_PULLED}", (PULL,))] * pulled
    problems += [
        Problem(
            f"the effects of task {name!r} are not declared, {_BEHIND} The plan has it in "
            f"{_where_in(plan, name)}",
            (name,),
        )
        for name in undeclared
    ]
    # Tasks that share the same states with the body have one problem together.
    alike: dict[tuple[Location, ...], list[str]] = {}
    for name, places in shared.items():
        alike.setdefault(tuple(sorted(places)), []).append(name)
    return problems + [
        Problem(_shared(plan, names, places), tuple(names)) for places, names in alike.items()
    ]


def _undeclared_apart(plan: PipelinePlan, effects: EffectTable) -> list[str]:
    """Return the undeclared tasks on another thread than the body, or than the first of them.

    Tasks on different threads have no order, whatever their stages are.
    """
    group = {name: entry.thread_group for name, entry in plan.schedule.items()}
    group |= {BODY: DEFAULT_GROUP, PULL: plan.pull_group or DEFAULT_GROUP}
    undeclared = [name for name in effects if effects[name].undeclared]
    # Loader and body come first: the rest have to be on the thread of the first of all.
    undeclared.sort(key=lambda name: (name not in OTHERS, name))
    return [n for n in undeclared if n not in OTHERS and group[n] != group[undeclared[0]]]


def _where_in(plan: PipelinePlan, name: str) -> str:
    """Return the places of a task in the plan that differ from those of the loop's body."""
    entry = plan.schedule[name]
    last = plan.max_stage
    places = {
        f"stage {entry.stage} (the last is {last})": entry.stage != last,
        f"thread group {entry.thread_group!r}": entry.thread_group != DEFAULT_GROUP,
        f"stream {entry.stream!r}": entry.stream is not None,
    }
    return listed([words for words, holds in places.items() if holds])


def _shared(plan: PipelinePlan, names: Sequence[str], places: Sequence[Location]) -> str:
    """Return the text for tasks that share states with the body: what is wrong, and the mend."""
    tasks = listed([repr(name) for name in names], most=4)
    alone = len(names) == 1
    where = f"The plan has {names[0]!r} in {_where_in(plan, names[0])}"
    if places == (DRAWS,):
        return (
            f"{tasks} {'is' if alone else 'are'} random, which seeds {DRAWS.name}, and the loop's "
            "body may draw from them at the same time. Move it to the caller's thread; let it draw "
            "from a torch.Generator of its own, seeded by ctx.iter_idx; or declare "
            f'DeclaredIO(state="{DRAWS.name}", mode="r", others="") if nothing else draws. {where}'
        )
    states = [place for place in places if place not in (DRAWS, UNDECLARED)]
    touched = listed([str(place) for place in states])
    return (
        f"{tasks} {'touches' if alone else 'touch'} {touched}, which the loop's body "
        "may touch, too, and so must stay with the body: in the last stage, on the "
        "caller's thread and stream. Move them there; or declare how other code touches the state, "
        f'DeclaredIO(state="{states[0].name}", ..., others="r" or ""); or call run(), which '
        f"has no body. {where}"
    )


_PULLED = (
    "and the plan pulls batches ahead of the loop's body: use pipeline_depth=1 and no pull_group; "
    "or pass a loader that uses nothing that the loop changes, such as a DataLoader with workers, "
    "as loader=; or declare with pull_ahead=True that yours does not"
)
_BEHIND = (
    "so it has to stay with the loop's body: in the last stage, on the caller's thread and stream. "
    "Move it there, or declare its effects: pure=True if it changes its context only, and uses "
    "nothing else that changes; otherwise "
    'io=[DeclaredIO(state="its name", mode=..., others="")] for each state that neither the body '
    "nor an undeclared task touches."
)


def stale_problems(plan: PipelinePlan, effects: EffectTable) -> list[Problem]:
    """Return a problem for each state that ``stale`` or ``newer`` names and no task touches."""
    touched = {p.name for e in effects.values() for p in e.places if p.persistent}
    rule = f"which no task touches (touched are: {listed(sorted(touched))})"
    mend = "correct the name, or take it out"
    named = [("stale", state) for state in plan.stale] + [("newer", state) for state in plan.newer]
    unknown = [(what, state) for what, state in named if state not in touched]
    return [
        Problem(f"{what} names state {shown(state)}, {rule}: {mend}") for what, state in unknown
    ]


# --------------------------------------------------------------------------------------- in words


def _text(violation: Violation, mend: str) -> str:
    """Return the text of a violation: what is wrong, over which locations, and how to mend it."""
    distance = violation.distance
    consumer = f"{violation.consumer!r} on iteration i"
    producer = f"{violation.producer!r} on iteration i" + (f" - {distance}" if distance else "")
    # Two tasks may share hundreds of parameters: the first few are enough to find the rest.
    places = [f"{c.place} ({c.hazard})" for c in violation.conflicts]
    more = f" and {len(places) - SHOWN_PLACES} more" if len(places) > SHOWN_PLACES else ""
    what = f"both touch {', '.join(places[:SHOWN_PLACES])}{more}"
    # Within the range of a shift, the fault is not the order but that it depends on timing.
    if violation.either:
        return (
            f"{consumer} may come before or after {producer}, and {what}: "
            f"{' and '.join(_shifted(violation))} reads are allowed, but must be the same in every "
            f"run: {mend}"
        )
    fault = "always comes before it" if violation.reversed else "may come before it"
    return f"{consumer} must come after {producer}, but {fault}, and {what}: {mend}"


def _where(plan: PipelinePlan, violation: Violation) -> str:
    # Elsewhere, the order of a stream keeps the two tasks apart.
    if True not in violation.devices:
        return "on a device without streams, such as the CPU: "
    both = [plan.schedule.get(task) for task in (violation.producer, violation.consumer)]
    of = " and ".join(stream_name(entry.stream) for entry in both if entry is not None)
    return f"on a device with streams (here {of}): "


def _mend(plan: PipelinePlan, violation: Violation) -> Problem:
    """Return the edge to add or, if the plan could not keep it, what stands in its way."""
    consumer = violation.consumer
    producer = violation.producer
    distance = violation.distance
    pair = (consumer, producer)
    # The loader is no task, so no edge can name it.
    if PULL in pair:
        text = "pull each batch after the iteration before it: pipeline_depth=1, and no pull_group"
        return Problem(text, pair)
    # The edge is there, but orders functions only, and the state is used by device work.
    if pair in plan.host_only:
        text = (
            f"the edge between them is host_only, which orders their functions and not their work "
            f'on streams: take ("{consumer}", "{producer}") out of host_only, or declare '
            "on_host=True for a state that no device work uses"
        )
        return Problem(text, pair)
    declared = (*plan.deps, *plan.cross_iter_deps, *plan.same_period_deps)
    if is_host(plan.schedule[consumer].stream) and pair in [edge[:2] for edge in declared]:
        text = (
            f"{consumer!r} is declared to work on the host alone, and does not wait for the device "
            f"work of {producer!r}: leave out stream=HOST, or declare on_host=True for a state "
            "that no device work uses"
        )
        return Problem(text, pair)
    # Only a group with several workers runs one task on two iterations at once.
    if consumer == producer:
        undeclared = any(conflict.place == UNDECLARED for conflict in violation.conflicts)
        declare = "declare its effects (pure=True, or states in io), or " if undeclared else ""
        text = (
            f"its {plan.schedule[consumer].workers} workers run it on several iterations at once: "
            f'{declare}leave workers out, or add cross_iter_deps=[("{consumer}", "{consumer}")], '
            "with which they take turns"
        )
        return Problem(text, pair)
    edge = ProposedEdge(consumer, producer, distance)
    # The lag s(consumer) - s(producer) + distance must be at least 0.
    s_c = plan.schedule[consumer].stage
    s_p = plan.schedule[producer].stage
    if s_c - s_p + distance < 0:
        later = ProposedStage(s_p - distance, "later", s_c)
        earlier = ProposedStage(s_c + distance, "earlier", s_p)
        text = f"move {consumer!r} from {later}, or {producer!r} from {earlier}, and add {edge}"
        return Problem(text, pair, (edge, later, earlier))
    changed = replace(plan, deps=[*plan.deps, pair])
    if distance:
        changed = replace(plan, cross_iter_deps=[*plan.cross_iter_deps, (*pair, distance)])
    # The plan is resolved once with the edge, so that no message proposes an edge that is refused.
    try:
        resolve_plan(changed)
    except CycleError as error:
        later = ProposedStage(s_c + 1, "later")
        text = (
            f"to add {edge} would make a cycle ({error}): take out what puts {consumer!r} first, "
            f"or move {consumer!r} to {later}, and add it"
        )
        return Problem(text, pair, (edge, later))
    return Problem(f"add {edge}", pair, (edge,))


def _meant(
    plan: PipelinePlan,
    pair: EffectTable,
    violation: Violation,
    guaranteed: Iterable[HappensBefore],
) -> str:
    """Return the declaration that allows reads at a constant shift, if there is one; else ""."""
    persistent = all(conflict.place.persistent for conflict in violation.conflicts)
    if violation.either or not (violation.reversed and persistent):
        return ""  # the order depends on timing, which no shift allows, or on a context's attribute
    shifted = _shifted(violation)
    # The least shift is proposed, since a larger one would allow more than the plan does.
    for count in range(1, plan.depth + 1):
        shifts = {what: dict.fromkeys(states, count) for what, states in shifted.items()}
        stale = {**plan.stale, **shifts.get("stale", {})}
        newer = {**plan.newer, **shifts.get("newer", {})}
        required = required_orders(pair, stale, newer)
        if not violations(required, guaranteed):
            fields = ", ".join(f"{what}={states}" for what, states in shifts.items())
            ways = " and ".join("ahead" if what == "newer" else "behind" for what in shifts)
            return f"; or, if reads may be {count} {ways}, set {fields}"
    return ""


def _shifted(violation: Violation) -> dict[str, list[str]]:
    """Return the states of a violation, by the plan's field that would allow its order."""
    states: dict[str, list[str]] = {}
    for conflict in violation.conflicts:
        # A reader that should come first and comes second finds a newer state.
        what = "newer" if conflict.hazard == "write after read" else "stale"
        states.setdefault(what, []).append(conflict.place.name)
    return states
