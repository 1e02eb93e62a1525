"""What a recording found: effects, sizes, the dependences that follow, and what it cannot see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import or_

from swpipe.analysis.validation import validate
from swpipe.core.effects import Effects, Location
from swpipe.core.plan import DistantPair, Pair, PipelinePlan, TaskSchedule
from swpipe.core.task import PipelineTask
from swpipe.inference.comparison import Comparison, Needed, compare, needed


@dataclass(frozen=True)
class Recording:
    """What some tasks touch.

    Attributes:
        tasks: In serial order.
        effects: Task to what it reads and writes, declared states included; in serial order.
        states: State to what it stands for: names of parameters, gradients and the like.
        sizes: (task, attribute that it set) to bytes, 0 where it deleted it; the largest of the
            recorded iterations. Memory counts for each attribute that shares it.
        collectives: Tasks that were seen to communicate.
        notes: What was not, or not surely, seen; whole sentences.
    """

    tasks: tuple[PipelineTask, ...]
    effects: Mapping[str, Effects]
    states: Mapping[str, tuple[str, ...]]
    sizes: Mapping[tuple[str, str], int]
    collectives: frozenset[str]
    notes: tuple[str, ...]

    def together(self, others: Iterable[Recording]) -> Recording:
        """What the same tasks touch here or there: on other ranks, or on other batches.

        Args:
            others: Their ``tasks`` are of no interest, and may be empty, to be sent.

        Raises:
            ValueError: One is of other tasks.
        """
        found = [self, *others]
        for other in found:
            if list(other.effects) != list(self.effects):
                raise ValueError(
                    f"a recording of {', '.join(other.effects)} is of other tasks than one of "
                    f"{', '.join(self.effects)}: record the same tasks in the same order"
                )
        states = list(dict.fromkeys(state for each in found for state in each.states))
        return Recording(
            self.tasks,
            {task: reduce(or_, (each.effects[task] for each in found)) for task in self.effects},
            {state: _once(each.states.get(state, ()) for each in found) for state in states},
            {
                key: max(each.sizes.get(key, 0) for each in found)
                for key in dict.fromkeys(key for each in found for key in each.sizes)
            },
            frozenset().union(*(each.collectives for each in found)),
            _once(each.notes for each in found),
        )

    def dependences(self) -> Dependences:
        """The fewest dependences that keep all tasks in their serial order where it matters."""
        return Dependences(needed(self.effects))

    def plan(self) -> PipelinePlan:
        """All tasks in stage 0 on the caller's thread, with the dependences that were found.

        Tasks that were seen to communicate are globally ordered.
        """
        found = self.dependences()
        return PipelinePlan(
            schedule={
                task: TaskSchedule(globally_ordered=task.name in self.collectives)
                for task in self.tasks
            },
            deps=found.deps,
            cross_iter_deps=found.cross_iter_deps,
        )

    def compare(self, plan: PipelinePlan) -> Comparison:
        """Dependences that a plan lacks, and those that nothing recorded asks for.

        Raises:
            PlanError: The plan cannot run with these tasks at all.
        """
        return compare(validate(plan, self.tasks), self.effects)

    def report(self, plan: PipelinePlan | None = None) -> InferenceReport:
        """All that was found, to be printed; with a plan, how it compares.

        Raises:
            PlanError: The plan cannot run with these tasks at all.
        """
        return InferenceReport(self, None if plan is None else self.compare(plan))


@dataclass(frozen=True)
class Dependences:
    """Dependences that a recording asks for.

    Attributes:
        needed: All of them, with what they are for.
    """

    needed: tuple[Needed, ...] = field(repr=False)

    @property
    def deps(self) -> tuple[Pair, ...]:
        """(consumer, producer), for ``PipelinePlan.deps``."""
        return tuple((one.consumer, one.producer) for one in self.needed if not one.distance)

    @property
    def cross_iter_deps(self) -> tuple[DistantPair, ...]:
        """(consumer, producer, 1), for ``PipelinePlan.cross_iter_deps``."""
        return tuple((one.consumer, one.producer, 1) for one in self.needed if one.distance)


@dataclass(frozen=True)
class InferenceReport:
    """What a recording found, as text.

    Attributes:
        recording: What was found.
        comparison: With a plan, if one was given.
    """

    recording: Recording
    comparison: Comparison | None = None

    def __str__(self) -> str:
        parts = [self._tasks(), self._states(), self._dependences(), self._notes()]
        return "\n\n".join(part for part in parts if part)

    def _tasks(self) -> str:
        from tabulate import tabulate

        rows = [
            (task, _places(effects.reads), _places(effects.writes))
            for task, effects in self.recording.effects.items()
        ]
        return tabulate(rows, ("task", "reads", "writes"), maxcolwidths=[None, 48, 48])

    def _states(self) -> str:
        rows = [
            f"  {name}: {_listed(members)}"
            for name, members in self.recording.states.items()
            if members != (name,)
        ]
        return "\n".join(["states:", *rows]) if rows else ""

    def _dependences(self) -> str:
        if self.comparison is not None:
            return str(self.comparison)
        found = self.recording.dependences().needed
        return "\n".join(["dependences:", *(f"  {one}" for one in found)]) if found else ""

    def _notes(self) -> str:
        return "\n".join(["notes:", *(f"  - {note}" for note in self.recording.notes)])


def _once(lists: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The entries of all, each once."""
    return tuple(dict.fromkeys(chain.from_iterable(lists)))


def _places(places: Iterable[Location]) -> str:
    names = sorted(p.name if p.persistent else str(p) for p in places)
    return ", ".join(names)


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
