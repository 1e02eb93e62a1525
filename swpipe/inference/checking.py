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

Assumptions
    - What neither goes through torch's operators nor through the context is not seen: numpy,
      kernels launched directly, Python values, an optimizer's options, threads that a task starts.
      A recording finds most of these before a run.
    - A gradient that is cleared without an operator counts for a task whose code says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swpipe._tensors.pytree import grad_or_none, tensors_in
from swpipe.analysis.races import guarantees, race_problems
from swpipe.analysis.validation import refusal
from swpipe.core.effects import Effects, Location
from swpipe.core.errors import Problem
from swpipe.core.resolved import ResolvedPlan
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.inference.accesses import READ_WRITE, WRITE, Access
from swpipe.inference.declared import DECLARED, assign_declared
from swpipe.inference.generators import TORCH
from swpipe.inference.operators import OperatorRecorder
from swpipe.inference.reach import reach_of
from swpipe.inference.recorded_context import AttributeLog, attributes, set_log
from swpipe.inference.state_items import StateItem, reachable_items
from swpipe.inference.storages import StorageId, Storages

_CLEARS = ("zero_grad", "grad")
"""Names in code that may clear gradients."""

_MOST_DEAD = 4096
"""How many places are added before those are dropped whose memory or iteration is gone."""


class Run(NamedTuple):
    """One task on one iteration."""

    iteration: int
    task: str


@dataclass(slots=True)
class Place:
    """Something that several tasks can touch.

    Attributes:
        kind: "memory", "gradient", "attribute" or "generator".
        number: The storage's, an attribute's iteration, the id of a parameter or generator.
        name: Of the attribute or generator; what the memory was first seen as.
        reference: Weak, to the memory: its number is not used again.
        runs: Who touched it in the last iterations, and how.
        users: All who ever did, and how.
        ordered: All of them are kept in order, however many iterations lie between two.
        allowed: Pairs that the plan allows in either order.
    """

    kind: str
    number: int
    name: str = ""
    reference: Any = None
    runs: dict[Run, Access] = field(default_factory=dict)
    users: set[tuple[str, Access]] = field(default_factory=set)
    ordered: bool = True
    allowed: set[tuple[str, str, int]] = field(default_factory=set)


class EffectCheck:
    """What the runs of one pipeline are checked for; call it for each run.

    Args:
        resolved: The pipeline's plan.
        tasks: Its tasks, in serial order.
        device: Its device.

    Attributes:
        clears: Tasks whose code may clear gradients.
        depth: How many iterations may be in flight.
    """

    def __init__(
        self, resolved: ResolvedPlan, tasks: Sequence[PipelineTask], device: Device
    ) -> None:
        self.tasks, self.device, self.plan = tuple(tasks), device, resolved.plan
        self.clears = frozenset(task.name for task in tasks if _may_clear_gradients(task))
        self.depth = resolved.plan.depth
        self._random = frozenset(task.name for task in tasks if task.random)
        self._serial = {task.name: number for number, task in enumerate(tasks)}
        self._resolved = resolved
        (self._guaranteed,) = guarantees(resolved, device.has_streams)
        self._kept: dict[tuple[str, str, int], bool] = {}

    def __call__(self) -> RunCheck:
        return RunCheck(self)

    def keeps(self, place: Place, first: str, then: str, distance: int) -> bool:
        """Whether every interleaving has ``first`` before ``then``, ``distance`` iterations on."""
        if distance > self.depth or (first == then and not distance):
            return True  # only one of the two is in flight
        if place.name == TORCH and {first, then} <= self._random:
            return True  # each is seeded for itself
        key = first, then, distance
        if key not in self._kept:
            self._kept[key] = self._guaranteed.keeps(*key)
        return self._kept[key]

    def keeps_all(self, place: Place, task: str, access: Access) -> bool:
        """Whether a task is kept in serial order with all users of a place, on any iterations."""
        others = [other for other, how in place.users if access.writes or how.writes]
        pairs = [pair for other in others for pair in ((task, other), (other, task))]
        return all(
            self.keeps(place, first, then, distance)
            for first, then in pairs
            for distance in range(self.depth + 1)
            if distance or self._serial[first] < self._serial[then]
        )

    def serially(self, one: Run, other: Run) -> tuple[Run, Run]:
        """The two in their serial order."""
        both = sorted((one, other), key=lambda run: (run.iteration, self._serial[run.task]))
        return both[0], both[1]

    def problems(self, place: Place, location: Location) -> list[Problem]:
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
        self._places: dict[tuple[str, int, str], Place] = {}
        self._most = _MOST_DEAD
        reached = reachable_items(check.tasks).tensors.values()
        self._parameters = [one for one in reached if one.requires_grad and one.is_leaf]

    @contextmanager
    def watching(self, task: PipelineTask, ctx: Any) -> Iterator[None]:
        """Watch a task that runs within the block, on this thread.

        Raises:
            PlanError: The plan does not order what it touched.
        """
        log, operators = AttributeLog(), DrawRecorder(self._check.device)
        before = [grad_or_none(one) for one in self._parameters]
        set_log(ctx, log)
        try:
            with operators:
                yield
        finally:
            set_log(ctx, None)
        run = Run(ctx.iter_idx, task.name)
        with self._lock:
            for place, access in self._touched(run, log, operators, before):
                self._add(place, run, access, ctx)
            if len(self._places) > self._most:
                self._forget(run.iteration)

    def _touched(
        self,
        run: Run,
        log: AttributeLog,
        operators: DrawRecorder,
        before: Sequence[Tensor | None],
    ) -> Iterator[tuple[Place, Access]]:
        """Each place that a task touched, and how."""
        for name in log.reads | log.sets | log.deletes:
            access = Access(name in log.reads, name in log.sets | log.deletes)
            yield self._place("attribute", run.iteration, name), access
        for number, name in operators.draws.items():
            yield self._place("generator", number, name), READ_WRITE
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
        run: Run,
        storages: Storages,
        used: tuple[set[StorageId], set[StorageId]],
        before: Sequence[Tensor | None],
    ) -> Iterator[tuple[Place, Access]]:
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

    def _place(self, kind: str, number: int, name: str = "") -> Place:
        key = kind, number, name
        if key not in self._places:
            self._places[key] = Place(*key)
        return self._places[key]

    def _add(self, place: Place, run: Run, access: Access, ctx: Any) -> None:
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
            place.runs = {r: a for r, a in place.runs.items() if self._is_near(r, run.iteration)}

    def _compare(self, place: Place, run: Run, other: Run, ctx: Any) -> None:
        """Raise if the plan does not keep two conflicting runs in serial order."""
        check = self._check
        first, then = check.serially(run, other)
        pair = first.task, then.task, then.iteration - first.iteration
        if pair in place.allowed or check.keeps(place, *pair):
            return
        locations = self._called(place, {run.iteration, other.iteration}, ctx)
        stale = [one for one in locations if one.name in check.plan.stale]
        location = (stale or locations)[0]
        found = [p for p in check.problems(place, location) if {*p.tasks} == {*pair[:2]}]
        found.sort(key=lambda problem: problem.tasks != (then.task, first.task))
        if found:
            raise refusal(check.plan, [_told(location, run, other, found[0])])
        place.allowed.add(pair)

    def _called(self, place: Place, iterations: set[int], ctx: Any) -> list[Location]:
        """What messages and ``PipelinePlan.stale`` call a place, the best name first."""
        if place.kind == "attribute":
            return [Location(place.name, False)]
        if place.kind == "generator":
            return [Location(place.name, True)]
        for item, tensor in self._items():
            if place.kind == "gradient" and id(tensor) == place.number:
                gradient = StateItem(f"{item.name}.grad", item.owner, "gradients")
                return _names(gradient)
            if place.kind == "memory" and place.number in Storages().of(tensor):
                return _names(item)
        name = f"unnamed memory ({place.name})"
        for attribute, value in attributes(ctx).items():
            if any(place.number in Storages().of(tensor) for tensor in tensors_in(value)):
                name = attribute if len(iterations) == 1 else f"memory of ctx.{attribute}"
        return [Location(name, len(iterations) > 1)]

    def _items(self) -> Iterable[tuple[StateItem, Tensor]]:
        tasks = self._check.tasks
        return assign_declared(reachable_items(tasks).tensors, tasks).items()

    def _is_near(self, run: Run, iteration: int) -> bool:
        """Whether a task on ``iteration`` or later may have to be compared with a run."""
        return run.iteration >= iteration - 2 * self._check.depth

    def _forget(self, iteration: int) -> None:
        """Drop the places that no task can touch any more."""
        gone = [
            key
            for key, place in self._places.items()
            if (place.reference is not None and place.reference.expired())
            or (place.kind == "attribute" and not self._is_near(Run(place.number, ""), iteration))
        ]
        for key in gone:
            del self._places[key]
        self._most = 2 * len(self._places) + _MOST_DEAD


class DrawRecorder(OperatorRecorder):  # type: ignore[no-untyped-call]
    """An operator recorder that also tells which generators the operators drew from.

    Attributes:
        storages: Those that the operators used.
        draws: The generator's id to its name; 0 for torch's default generators.
    """

    def __init__(self, device: Device) -> None:
        self.storages = Storages()
        super().__init__(self.storages)
        self.draws: dict[int, str] = {}
        self._device = device

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and see whether it draws; dropout with a rate of 0 does not."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            self.draws[id(kwargs["generator"])] = "a torch.Generator"
            return func(*args, **kwargs)
        before = self._states()
        result = func(*args, **kwargs)
        if self._states() != before:
            self.draws[0] = TORCH
        return result

    def _states(self) -> list[bytes]:
        return [bytes(state.numpy()) for state in self._device.generator_states().values()]


def _may_clear_gradients(task: PipelineTask) -> bool:
    reach = reach_of(task)
    taken = set[str | None]().union(reach.stores, *reach.uses.values())
    return not taken.isdisjoint(_CLEARS)


def _names(item: StateItem) -> list[Location]:
    """What an item or a group with it is called in recordings."""
    if item.kind == DECLARED:
        return [Location(item.owner, True)]
    parts = item.name.split(".")
    prefixes = [".".join(parts[:count]) for count in range(1, len(parts))]
    names = [item.name, *(f"{one} {item.kind}" for one in (item.owner, *prefixes))]
    return [Location(name.strip(), True) for name in names]


def _told(location: Location, run: Run, other: Run, problem: Problem) -> Problem:
    text = (
        f"check_effects: task {run.task!r} on iteration {run.iteration} touched {location}, which "
        f"{other.task!r} on iteration {other.iteration} touches as well, and the plan does not "
        f"keep their order: {problem.text}. The run may have differed from a serial one already"
    )
    return Problem(text, problem.tasks)
