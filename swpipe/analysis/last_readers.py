"""The places where attributes of the context are deleted, under a plan with ``keep``.

    period order    copy i+1    forward i    backward i    <retire> i
    ctx.batch       set ......> read |
                                     `-- deleted here: all tasks that may use it have returned
    ctx.loss                    set ...> read              never deleted: keep names it

A task *uses* an attribute if it reads, sets, modifies or deletes it, according to its ``reads`` or
to a recording. A task with neither is assumed to use every attribute. An attribute is deleted at
the first place of the period that comes after all its users in every interleaving
(``happens_before``). This is after a user, if that user comes after all other ones; else before the
next task that comes after all of them, or at ``<retire>``. So no lane gets a new wait. An attribute
that no task is known to use is deleted at ``<retire>``, too.

The places are decided here, once, from the compiled program; ``swpipe._engine.release`` documents
what happens at these places in a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from swpipe.analysis.happens_before import HappensBefore
from swpipe.core.effects import EffectTable
from swpipe.core.messages import listed
from swpipe.core.plan import PULL, PipelinePlan
from swpipe.core.releases import Release, Releases
from swpipe.core.resolved import resolve_plan
from swpipe.core.task import PipelineTask
from swpipe.program import RETIRE, Program

Uses: TypeAlias = Mapping[str, frozenset[str] | None]
"""Task to the attributes that it uses; None for a task whose attributes are not known."""

BATCH = "batch"


class ReleasePlace(NamedTuple):
    """A place where attributes are deleted: before a task's turn, or after it."""

    task: str
    after: bool


def uses_of(
    tasks: Iterable[PipelineTask], effects: EffectTable | None = None
) -> dict[str, frozenset[str] | None]:
    """Return the attributes that tasks use, as they declare or were recorded to.

    A table without any attribute, such as a table of declared states, tells nothing of attributes.
    """
    recorded = {
        name: frozenset(place.name for place in touched.places if not place.persistent)
        for name, touched in (effects or {}).items()
        if name != PULL
    }
    # Otherwise every task would be taken to use no attribute at all.
    if not any(recorded.values()):
        recorded = {}
    uses: dict[str, frozenset[str] | None] = {}
    for task in tasks:
        known = recorded.get(task.name)
        # A recording may have missed a branch that ``reads`` names, so both count.
        declared = None if task.reads is None else frozenset(task.reads)
        uses[task.name] = declared if known is None else known | (declared or frozenset())
    return uses


def users_of(uses: Uses) -> dict[str, tuple[str, ...]]:
    """Return the users of each attribute that some task is known to use, and of the batch."""
    named = {BATCH}.union(*(names for names in uses.values() if names is not None))
    return {
        # A task with unknown attributes uses all of them.
        name: tuple(task for task, names in uses.items() if names is None or name in names)
        for name in sorted(named)
    }


def releases_of(before: HappensBefore, uses: Uses, keep: Sequence[str]) -> Releases:
    """Return the places where attributes are deleted that are not kept.

    Args:
        before: The order that the compiled plan keeps.
        uses: The attributes of all its tasks, from ``uses_of``.
        keep: The attributes that stay.
    """
    kept = frozenset(keep) | {"iter_idx"}  # error messages name the iteration
    places = ReleasePlaces(before)
    users = {name: tasks for name, tasks in users_of(uses).items() if name not in kept}
    # Attributes of the same place are deleted together, after one wait for the device.
    at: dict[ReleasePlace, list[str]] = {}
    for name, tasks in users.items():
        at.setdefault(places.after(tasks), []).append(name)
    at_task: dict[str, tuple[Release, ...]] = {}
    for place, names in at.items():
        release = Release(place.after, tuple(names), places.behind(place))
        at_task[place.task] = (*at_task.get(place.task, ()), release)
    return Releases(
        kept,
        uses,
        at_task,
        {name: _why(tasks, keep) for name, tasks in users.items()},
        _why((), keep),
    )


def with_releases(
    before: HappensBefore,
    tasks: Sequence[PipelineTask],
    effects: EffectTable | None,
    keep: Sequence[str],
) -> tuple[Program, Releases]:
    """Return the program with the events that releases need, and the releases.

    Args:
        before: The order that the compiled plan keeps.
        tasks: The tasks, in serial order.
        effects: The recorded effects, if any.
        keep: The attributes that stay.
    """
    # A serial iteration, as in a recording, has its own order and so its own places.
    uses = uses_of(tasks, effects)
    serial = HappensBefore.of(resolve_plan(PipelinePlan.serial(tasks)), streams=False)
    releases = releases_of(before, uses, keep)
    serially = releases_of(serial, uses, keep)
    return _recording(before.program, releases), replace(releases, serially=serially)


def _recording(program: Program, releases: Releases) -> Program:
    """Return the program with the events that releases wait for."""
    waited_for = {
        task for at_task in releases.at.values() for release in at_task for task in release.behind
    }
    if not waited_for:
        return program
    lanes = tuple(
        replace(
            lane,
            instructions=tuple(
                replace(ins, record=ins.record or ins.task in waited_for)
                for ins in lane.instructions
            ),
        )
        for lane in program.lanes
    )
    # A release waits for its events at the same place of its worker's next iteration, which is
    # ``workers`` iterations later: the ring of events holds that many iterations more.
    return replace(program, lanes=lanes, ring=program.ring + max(lane.workers for lane in lanes))


class ReleasePlaces:
    """The places of a program, and the tasks that come before them."""

    def __init__(self, before: HappensBefore) -> None:
        instructions = before.program.instructions
        # By the time at which an iteration comes to them: stage first, then order in the period.
        order = [*before.program.tasks, RETIRE]
        self._by_turn = sorted(
            order, key=lambda name: (instructions[name].stage, order.index(name))
        )
        self._before = before
        self._on_host = {name for name in order if instructions[name].on_host}
        self._waits = before.streams and before.plan.names_streams

    def after(self, users: Sequence[str]) -> ReleasePlace:
        """Return the first place after all of these tasks; ``<retire>`` if there are none."""
        if users:
            for task in self._by_turn:
                # ``task == user``: the place after a user's own turn.
                if all(task == user or self._before.host(user, task, 0) for user in users):
                    return ReleasePlace(task, task in users)
        return ReleasePlace(RETIRE, False)

    def behind(self, place: ReleasePlace) -> tuple[str, ...]:
        """Return the tasks whose device work ends last before a place.

        When their work is done, that of all tasks before the place is. The result is empty if all
        work is on one stream, or there is none.
        """
        if not self._waits:
            return ()
        # Without ``<retire>``, the last one, which has no work of its own.
        before = [task for task in self._by_turn[:-1] if self._before.host(task, place.task, 0)]
        before += [place.task] if place.after else []
        before = [task for task in before if task not in self._on_host]  # these have no event
        return tuple(
            task
            for task in before
            if not any(task != other and self._before.device(task, other, 0) for other in before)
        )


def _why(users: Sequence[str], keep: Sequence[str]) -> str:
    when = "at the end of the iteration"
    if users:
        when = f"after its declared or recorded users, {listed([*map(repr, users)])}"
    return (
        f"it was released {when}, because keep={[*keep]} does not name it. Add it to keep if it is "
        "read after the iteration, or else to reads of the task that reads it"
    )
