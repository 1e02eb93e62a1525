"""Checks, while a pipeline runs, that its plan orders what the tasks really touch.

    task T, iteration i      function returned
        operators  ──────>   memory: read, written         ┐   each place keeps who touched it,
        context    ──────>   attributes: read, set         ├─> and each pair of which one writes
        generators ──────>   drawn from                    ┘   is asked of ``HappensBefore``

A plan is verified for what was declared, recorded or assumed. This looks at the iterations
themselves, and at nothing else: whatever touches the same place as another task, and is not kept in
serial order with it by the plan, is refused, in whichever order the two have just run.

Guarantees
    - Two tasks that touch the same place, one of them writing, raise unless every interleaving of
      the plan has them in serial order, or the plan allows the staleness. It does not depend on
      timing: all pairs of iterations that can be in flight together are compared.
    - What tasks do to the same place at the same time is told apart: operators and attributes are
      seen on the thread that runs the task, and not found by comparing a before with an after.

    - With a share, the same holds for iterations that are watched: the first ones, and then windows
      of ``depth`` + 1 iterations in a row, at places that depend on nothing but their number. So
      ranks watch the same ones, and what comes every so many iterations is met in the end.

Assumptions
    - What neither goes through torch's operators nor through the context is not seen: numpy,
      kernels launched directly, Python values, an optimizer's options, threads that a task starts.
      A recording finds most of these before a run.
    - A gradient that is cleared without an operator counts for a task whose code says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from swpipe._engine.iterations import Engine
from swpipe._state.generators import TORCH
from swpipe._state.reach import reach_of
from swpipe._tensors.pytree import grad_or_none
from swpipe.analysis.races import guarantees, race_problems
from swpipe.analysis.validation import refusal
from swpipe.core.effects import Effects, Location
from swpipe.core.errors import Problem
from swpipe.core.resolved import ResolvedPlan
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.inference.accesses import READ_WRITE, WRITE, Access
from swpipe.inference.draw_recorder import DrawRecorder
from swpipe.inference.recorded_context import AttributeLog, recorded_class, set_log
from swpipe.inference.state_items import reachable_items
from swpipe.inference.storages import StorageId, Storages
from swpipe.inference.watched_places import TaskRun, WatchedPlace, locations_of

_CLEARS = ("zero_grad", "grad")
"""Names in code that may clear gradients."""

_FIRST = 16
"""So many iterations are watched in any case: what comes every fourth or tenth time shows there."""

_SCATTER = 2_654_435_761
"""A prime, by which windows do not keep step with what comes every so many iterations."""

_MOST_DEAD = 4096
"""How many places are added before those are dropped whose memory or iteration is gone."""


def checked(
    engine: Engine, resolved: ResolvedPlan, tasks: Sequence[PipelineTask], share: float
) -> Engine:
    """The engine, with a check of what tasks touch in a share of the iterations."""
    check = EffectCheck(resolved, tasks, engine.device, share)
    return replace(engine, check=check, context=recorded_class(engine.context))


class EffectCheck:
    """What the runs of one pipeline are checked for; call it for each run.

    Args:
        resolved: The pipeline's plan.
        tasks: Its tasks, in serial order.
        device: Its device.
        share: Of the iterations, how many are watched: above 0, up to 1.

    Attributes:
        clears: Tasks whose code may clear gradients.
        depth: How many iterations may be in flight.

    Raises:
        ValueError: ``share`` is no such number.
    """

    def __init__(
        self,
        resolved: ResolvedPlan,
        tasks: Sequence[PipelineTask],
        device: Device,
        share: float = 1.0,
    ) -> None:
        if not (isinstance(share, int | float) and 0 < share <= 1):
            raise ValueError(
                f"check_effects is {share!r}: give True, False, or the share of the iterations "
                "that are watched, above 0 and up to 1"
            )
        self.tasks, self.device, self.plan = tuple(tasks), device, resolved.plan
        self.clears = frozenset(task.name for task in tasks if _may_clear_gradients(task))
        self.depth = resolved.plan.depth
        self._random = frozenset(task.name for task in tasks if task.random)
        self._serial = {task.name: number for number, task in enumerate(tasks)}
        self._resolved = resolved
        (self._guaranteed,) = guarantees(resolved, device.has_streams)
        self._kept: dict[tuple[str, str, int], bool] = {}
        self._window = self.depth + 1
        self._every = round(self._window / share)  # iterations, with one window among them

    def __call__(self) -> RunCheck:
        return RunCheck(self)

    def watches(self, iteration: int) -> bool:
        """Whether an iteration is watched; the same on all ranks."""
        turn, place = divmod(iteration, self._every)
        begin = turn * _SCATTER % (self._every - self._window + 1)
        return iteration < _FIRST or begin <= place < begin + self._window

    def keeps(self, place: WatchedPlace, first: str, then: str, distance: int) -> bool:
        """Whether every interleaving has ``first`` before ``then``, ``distance`` iterations on."""
        if distance > self.depth or (first == then and not distance):
            return True  # only one of the two is in flight
        if place.name == TORCH and {first, then} <= self._random:
            return True  # each is seeded for itself
        key = first, then, distance
        if key not in self._kept:
            self._kept[key] = self._guaranteed.keeps(*key)
        return self._kept[key]

    def keeps_all(self, place: WatchedPlace, task: str, access: Access) -> bool:
        """Whether a task is kept in serial order with all users of a place, on any iterations."""
        others = [other for other, how in place.users if access.writes or how.writes]
        pairs = [pair for other in others for pair in ((task, other), (other, task))]
        return all(
            self.keeps(place, first, then, distance)
            for first, then in pairs
            for distance in range(self.depth + 1)
            if distance or self._serial[first] < self._serial[then]
        )

    def serially(self, one: TaskRun, other: TaskRun) -> tuple[TaskRun, TaskRun]:
        """The two in their serial order."""
        both = sorted((one, other), key=lambda run: (run.iteration, self._serial[run.task]))
        return both[0], both[1]

    def problems(self, place: WatchedPlace, location: Location) -> list[Problem]:
        """Why the plan may not run the users of a place, if the place is called so."""
        users = {name: [how for task, how in place.users if task == name] for name in self._serial}
        effects = {
            name: Effects(
                frozenset([location] if any(how.reads for how in found) else []),
                frozenset([location] if any(how.writes for how in found) else []),
            )
            for name, found in users.items()
        }
        return race_problems(self._resolved, effects, streams=self.device.has_streams)


class RunCheck:
    """Checks the iterations of one run."""

    def __init__(self, check: EffectCheck) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._places: dict[tuple[str, int, str], WatchedPlace] = {}
        self._most = _MOST_DEAD
        reached = reachable_items(check.tasks).tensors.values()
        self._parameters = [one for one in reached if one.requires_grad and one.is_leaf]

    @contextmanager
    def watching(self, task: PipelineTask, ctx: Any) -> Iterator[None]:
        """Watch a task that runs within the block, on this thread.

        Raises:
            PlanError: The plan does not order what it touched.
        """
        if not self._check.watches(ctx.iter_idx):
            yield
            return
        log, operators = AttributeLog(), DrawRecorder(self._check.device)
        before = [grad_or_none(one) for one in self._parameters]
        set_log(ctx, log)
        try:
            with operators:
                yield
        finally:
            set_log(ctx, None)
        run = TaskRun(ctx.iter_idx, task.name)
        with self._lock:
            for place, access in self._touched(run, log, operators, before):
                self._add(place, run, access, ctx)
            if len(self._places) > self._most:
                self._forget(run)

    def _touched(
        self,
        run: TaskRun,
        log: AttributeLog,
        operators: DrawRecorder,
        before: Sequence[Tensor | None],
    ) -> Iterator[tuple[WatchedPlace, Access]]:
        """Each place that a task touched, and how."""
        for name in log.reads | log.sets | log.deletes:
            access = Access(name in log.reads, name in log.sets | log.deletes)
            yield self._place("attribute", run.iteration, name), access
        for number, generator in operators.draws.items():
            place = self._place("generator", number, str(generator or TORCH))
            place.reference = generator
            yield place, READ_WRITE
        accesses, storages = operators.accesses, operators.storages
        reads, writes = accesses.all_reads, accesses.writes | accesses.created
        for number in reads | writes:
            if storages.alive(number):
                place = self._place("memory", number)
                if place.reference is None:
                    place.reference = storages.reference(number)
                    place.name = storages.description(number)
                yield place, Access(number in reads, number in writes)
        yield from self._gradients(run, storages, (reads, writes), before)

    def _gradients(
        self,
        run: TaskRun,
        storages: Storages,
        used: tuple[set[StorageId], set[StorageId]],
        before: Sequence[Tensor | None],
    ) -> Iterator[tuple[WatchedPlace, Access]]:
        """Parameters whose gradient a task used, whichever memory that is in; or cleared."""
        clears = run.task in self._check.clears
        for parameter, old in zip(self._parameters, before, strict=True):
            new = grad_or_none(parameter)
            found = [grad for grad in (old, None if new is old else new) if grad is not None]
            numbers = {number for grad in found for number in storages.of(grad)}
            access = Access(*(not numbers.isdisjoint(one) for one in used))
            if clears and new is None and old is not None:
                access |= WRITE
            if any(access):
                yield self._place("gradient", id(parameter)), access

    def _place(self, kind: str, number: int, name: str = "") -> WatchedPlace:
        key = kind, number, name
        if key not in self._places:
            self._places[key] = WatchedPlace(*key)
        return self._places[key]

    def _add(self, place: WatchedPlace, run: TaskRun, access: Access, ctx: Any) -> None:
        """Note an access, and compare it with those of other tasks and iterations."""
        check = self._check
        if (run.task, access) not in place.users:
            place.users.add((run.task, access))
            place.ordered &= check.keeps_all(place, run.task, access)
        if not place.ordered:
            for other, how in place.runs.items():
                if access.writes or how.writes:
                    self._compare(place, run, other, ctx)
        place.runs[run] = access
        if len(place.runs) > 4 * check.depth * len(check.tasks):
            place.runs = {r: a for r, a in place.runs.items() if self._is_near(r, run)}

    def _compare(self, place: WatchedPlace, run: TaskRun, other: TaskRun, ctx: Any) -> None:
        """Raise if the plan does not keep two conflicting runs in serial order."""
        check = self._check
        first, then = check.serially(run, other)
        pair = first.task, then.task, then.iteration - first.iteration
        if pair in place.allowed or check.keeps(place, *pair):
            return
        within = run.iteration == other.iteration
        locations = locations_of(place, check.tasks, ctx, one_iteration=within)
        stale = [one for one in locations if one.name in check.plan.stale]
        location = (stale or locations)[0]
        found = [p for p in check.problems(place, location) if {*p.tasks} == {*pair[:2]}]
        found.sort(key=lambda problem: problem.tasks != (then.task, first.task))
        if found:
            raise refusal(check.plan, [_told(location, run, other, found[0])])
        place.allowed.add(pair)

    def _is_near(self, run: TaskRun, now: TaskRun) -> bool:
        """Whether a task that runs now, or later, may have to be compared with a run."""
        return run.iteration >= now.iteration - 2 * self._check.depth

    def _forget(self, now: TaskRun) -> None:
        """Drop the places that no task can touch any more, or has touched of late."""
        for key, place in list(self._places.items()):
            if place.kind == "memory":
                gone = place.reference.expired()
            else:
                gone = not any(self._is_near(run, now) for run in place.runs)
            if gone:
                del self._places[key]
        self._most = 2 * len(self._places) + _MOST_DEAD


def _may_clear_gradients(task: PipelineTask) -> bool:
    reach = reach_of(task)
    taken = set[str | None]().union(reach.stores, reach.sets, *reach.uses.values())
    return not taken.isdisjoint(_CLEARS)


def _told(location: Location, run: TaskRun, other: TaskRun, problem: Problem) -> Problem:
    text = (
        f"check_effects: task {run.task!r} on iteration {run.iteration} touched {location}, which "
        f"{other.task!r} on iteration {other.iteration} touches as well, and the plan does not "
        f"keep their order: {problem.text}. The run may have differed from a serial one already"
    )
    return Problem(text, problem.tasks)
