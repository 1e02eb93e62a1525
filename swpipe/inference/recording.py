"""The result of recording: effects, the dependences that the effects require, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any

from swpipe._values.stateful import Owners
from swpipe.analysis.validation import validate
from swpipe.core.effects import DRAWS, UNDECLARED, Effects, Location
from swpipe.core.messages import listed
from swpipe.core.plan import BODY, OTHERS, DistantPair, Pair, PipelinePlan, TaskSchedule
from swpipe.core.task import PipelineTask
from swpipe.inference.comparison import Comparison, Needed, compare_with_plan, needed


@dataclass(frozen=True)
class Recording:
    """The reads and writes of some tasks.

    Attributes:
        tasks: In serial order.
        effects: Task to what it reads and writes, including declared states; in serial order. The
            first entry is ``PULL``, if what the loader may access is known; the last entry is
            ``BODY``, what the loop's body may access.
        states: State to its members: names of parameters, gradients and so on.
        collectives: Tasks that communicated.
        notes: Sentences on what was not recorded, or not reliably.
        owners: The objects of this rank whose state was restored.
    """

    tasks: tuple[PipelineTask, ...]
    effects: Mapping[str, Effects]
    states: Mapping[str, tuple[str, ...]]
    collectives: frozenset[str]
    notes: tuple[str, ...]
    owners: Owners = field(default=Owners(), compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that are sent to other ranks: all but ``owners``."""
        # Owners are this process's own modules and optimizers, too large and of no use on another
        # rank.
        return {**vars(self), "owners": Owners()}

    def together(self, others: Iterable[Recording]) -> Recording:
        """Merge this recording with recordings of the same tasks on other ranks or batches.

        Args:
            others: The other recordings. Their ``tasks`` are not used and may be empty, so that
                they can be sent between ranks.

        Raises:
            ValueError: One of them is of other tasks.
        """
        recordings = [self, *others]
        for other in recordings:
            if list(other.effects) != list(self.effects):
                raise ValueError(
                    f"cannot merge a recording of {listed(other.effects)} with one of "
                    f"{listed(self.effects)}: record the same tasks in the same order"
                )
        # A dict keeps the order of first appearance, which a set would lose.
        states = list(dict.fromkeys(state for each in recordings for state in each.states))
        return Recording(
            self.tasks,
            {
                task: reduce(or_, (each.effects[task] for each in recordings))
                for task in self.effects
            },
            {state: _once(each.states.get(state, ()) for each in recordings) for state in states},
            frozenset().union(*(each.collectives for each in recordings)),
            _once(each.notes for each in recordings),
            self.owners,
        )

    def dependences(self) -> Dependences:
        """Return the fewest dependences that keep conflicting tasks in their serial order."""
        return Dependences(needed(self._of_tasks))

    def plan(self) -> PipelinePlan:
        """Return a plan with all tasks in stage 0 on the caller's thread, in the inferred order.

        Tasks that communicated are globally ordered.
        """
        dependences = self.dependences()
        return PipelinePlan(
            schedule={
                task: TaskSchedule(globally_ordered=task.name in self.collectives)
                for task in self.tasks
            },
            deps=dependences.deps,
            cross_iter_deps=dependences.cross_iter_deps,
        )

    def compare(self, plan: PipelinePlan) -> Comparison:
        """Return the dependences that a plan lacks, and those that no recorded access needs.

        Raises:
            PlanError: The plan cannot run with these tasks at all.
        """
        return compare_with_plan(validate(plan, self.tasks), self._of_tasks)

    @property
    def _of_tasks(self) -> Mapping[str, Effects]:
        """The effects of the tasks alone.

        A plan declares no dependences on the loader or the body.
        """
        return {name: touched for name, touched in self.effects.items() if name not in OTHERS}

    def report(self, plan: PipelinePlan | None = None) -> str:
        """Return the recording as text.

        Args:
            plan: A plan to compare with; the comparison takes the place of the list of dependences.

        Raises:
            PlanError: The plan cannot run with these tasks at all.
        """
        # Imported late, since only reports need it.
        from tabulate import tabulate

        # The body's effects are assumptions and not observations, so the table leaves them out.
        rows = [
            (task, _listed(effects.reads), _listed(effects.writes))
            for task, effects in self.effects.items()
            if task != BODY
        ]
        parts = [tabulate(rows, ("task", "reads", "writes"), maxcolwidths=[None, 48, 48])]
        # A state whose only member has the state's name would repeat itself.
        states = (
            f"{name}: {listed(members, 3)}"
            for name, members in self.states.items()
            if members != (name,)
        )
        parts += _section("states:", states)
        if plan is None:
            parts += _section("dependences:", map(str, self.dependences().needed))
        else:
            parts.append(str(self.compare(plan)))
        return "\n\n".join([*parts, *_section("notes:", (f"- {note}" for note in self.notes))])


@dataclass(frozen=True)
class Dependences:
    """The dependences inferred from a recording.

    Attributes:
        needed: All dependences, each with the locations that need it.
    """

    needed: tuple[Needed, ...] = field(repr=False)

    @property
    def deps(self) -> tuple[Pair, ...]:
        """Dependences within an iteration: (consumer, producer), for ``PipelinePlan.deps``."""
        return tuple((each.consumer, each.producer) for each in self.needed if not each.distance)

    @property
    def cross_iter_deps(self) -> tuple[DistantPair, ...]:
        """Dependences between iterations: (consumer, producer, 1), for ``cross_iter_deps``."""
        return tuple((each.consumer, each.producer, 1) for each in self.needed if each.distance)


def _section(title: str, lines: Iterable[str]) -> list[str]:
    """Return the lines indented below a title, or an empty list if there are no lines."""
    indented = [f"  {line}" for line in lines]
    return ["\n".join([title, *indented])] if indented else []


def _once(lists: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the entries of all lists without duplicates, in order of first appearance."""
    return tuple(dict.fromkeys(chain.from_iterable(lists)))


def _listed(places: frozenset[Location]) -> str:
    """Return the text for some locations.

    ``DRAWS`` is left out for an undeclared task, which is always assumed to draw.
    """
    # UNDECLARED already implies that the task may draw, so a second entry would only add noise.
    shown = places - {DRAWS} if UNDECLARED in places else places
    # str() marks attributes of the context with "ctx."; states appear by their plain names.
    return ", ".join(sorted(p.name if p.persistent else str(p) for p in shown))
