"""Where each attribute of the context goes, under a plan that says what it keeps.

    period order    copy i+1    forward i    backward i    <retire> i
    ctx.batch       set ......> read |
                                     `-- goes here: whatever may use it has been called and has
    ctx.loss                    set ...> read              returned; "loss" is kept

A task *uses* an attribute if it reads, sets, modifies or deletes it: as it says by ``reads``, or as
a recording has seen. A task of which neither is known uses every attribute. The place at which an
attribute goes is the first one of the period that comes after all its users in every interleaving
(``happens_before``): after a user, if that comes after all others, and else before the next task
that does, or at ``<retire>``. So no lane waits for another one that did not wait before. What no
task is known to use goes at ``<retire>``, too.

It is decided here, once, from the compiled program; what becomes of it in a run is told by
``swpipe._engine.release``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from swpipe._engine.program import RETIRE, Program
from swpipe.analysis.happens_before import HappensBefore
from swpipe.core.effects import EffectTable
from swpipe.core.messages import listed
from swpipe.core.plan import PULL, PipelinePlan
from swpipe.core.releases import Release, Releases
from swpipe.core.resolved import resolve_plan
from swpipe.core.task import PipelineTask

Uses: TypeAlias = Mapping[str, frozenset[str] | None]
"""Task to the attributes that it uses; None for a task of which that is not known."""

BATCH = "batch"


class ReleasePlace(NamedTuple):
    """Where attributes go: before a task's turn, or after it."""

    task: str
    after: bool


def uses_of(
    tasks: Iterable[PipelineTask], effects: EffectTable | None = None
) -> dict[str, frozenset[str] | None]:
    """What tasks use, as they say it or were recorded to.

    A table without any attribute, such as that of declared states, says nothing of attributes.
    """
    recorded = {
        name: frozenset(p.name for p in touched.reads | touched.writes if not p.persistent)
        for name, touched in (effects or {}).items()
        if name != PULL
    }
    if not any(recorded.values()):
        recorded = {}
    found: dict[str, frozenset[str] | None] = {}
    for task in tasks:
        known = recorded.get(task.name)
        said = None if task.reads is None else frozenset(task.reads)
        found[task.name] = said if known is None else known | (said or frozenset())
    return found


def users_of(uses: Uses) -> dict[str, tuple[str, ...]]:
    """Attribute to its users, of those that some task is known to use, and the batch."""
    named = {BATCH}.union(*(names for names in uses.values() if names is not None))
    return {
        name: tuple(task for task, names in uses.items() if names is None or name in names)
        for name in sorted(named)
    }


def releases_of(before: HappensBefore, uses: Uses, keep: Sequence[str]) -> Releases:
    """Where attributes go that are not kept.

    Args:
        before: The order that the compiled plan keeps.
        uses: As from ``uses_of``, of all its tasks.
        keep: What stays.
    """
    kept = frozenset(keep) | {"iter_idx"}
    places = ReleasePlaces(before)
    users = {name: tasks for name, tasks in users_of(uses).items() if name not in kept}
    at: dict[ReleasePlace, list[str]] = {}
    for name, tasks in users.items():
        at.setdefault(places.after(tasks), []).append(name)
    found: dict[str, tuple[Release, ...]] = {}
    for place, names in at.items():
        release = Release(place.after, tuple(names), places.behind(place))
        found[place.task] = (*found.get(place.task, ()), release)
    return Releases(
        kept,
        uses,
        found,
        {name: _why(places.last(tasks), keep) for name, tasks in users.items()},
        _why((), keep),
    )


def with_releases(
    before: HappensBefore,
    tasks: Sequence[PipelineTask],
    effects: EffectTable | None,
    keep: Sequence[str],
) -> tuple[Program, Releases]:
    """The program with the events that releases take, and what goes where; tasks are serial."""
    uses = uses_of(tasks, effects)
    serial = HappensBefore.of(resolve_plan(PipelinePlan.serial(tasks)), streams=False)
    releases = releases_of(before, uses, keep)
    serially = releases_of(serial, uses, keep)
    return _recording(before.program, releases), replace(releases, serially=serially)


def _recording(program: Program, releases: Releases) -> Program:
    """The program, with the events that are asked for: at a place, by the next of its thread."""
    asked = {task for found in releases.at.values() for one in found for task in one.behind}
    if not asked:
        return program
    lanes = tuple(
        replace(
            lane,
            instructions=tuple(
                replace(ins, record=ins.record or ins.task in asked) for ins in lane.instructions
            ),
        )
        for lane in program.lanes
    )
    return replace(program, lanes=lanes, ring=program.ring + max(one.workers for one in lanes))


class ReleasePlaces:
    """Places of a program, and what comes before them."""

    def __init__(self, before: HappensBefore) -> None:
        instructions = before.program.instructions
        order = [*before.program.tasks, RETIRE]
        self._by_turn = sorted(
            order, key=lambda name: (instructions[name].stage, order.index(name))
        )
        self._before = before
        self._on_host = {name for name in order if instructions[name].on_host}
        self._waits = before.streams and before.plan.names_streams

    def after(self, users: Sequence[str]) -> ReleasePlace:
        """The first place after all of these; ``<retire>`` if there are none."""
        if users:
            for task in self._by_turn:
                if all(task == user or self._before.host(user, task, 0) for user in users):
                    return ReleasePlace(task, task in users)
        return ReleasePlace(RETIRE, False)

    def last(self, users: Sequence[str]) -> list[str]:
        """Those that do not come before another one, whatever the interleaving."""
        return [
            one
            for one in users
            if not any(one != other and self._before.host(one, other, 0) for other in users)
        ]

    def behind(self, place: ReleasePlace) -> tuple[str, ...]:
        """The tasks before a place whose device work does not come before another one's of them.

        None, where all work is on one stream, or there is none.
        """
        if not self._waits:
            return ()
        before = [one for one in self._by_turn[:-1] if self._before.host(one, place.task, 0)]
        before += [place.task] if place.after else []
        before = [one for one in before if one not in self._on_host]  # these have no event
        return tuple(
            one
            for one in before
            if not any(one != other and self._before.device(one, other, 0) for other in before)
        )


def _why(last: Sequence[str], keep: Sequence[str]) -> str:
    names = [repr(name) for name in last]
    went = f"it went after task {listed(names)}" if names else "it went at the end of the iteration"
    who = ", the last to use it of those that are said or recorded to" if names else ""
    return (
        f"{went}{who}, since keep={[*keep]} does not name it. Add it to keep, if it is read after "
        "the iteration; or name it in reads of the task that reads it"
    )
