"""What a task of a schedule gets: the slots of its batch, the streams, the period.

A slot is an attribute of the iteration's context, so that whatever looks at a context (replay,
recordings, the holding of memory) sees it. Names that a context has for itself are put apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from swpipe.core.context import IterContext
from swpipe.core.messages import listed, shown
from swpipe.schedulable.stream_pool import StreamPool

BATCH = "batch_cpu"
"""The slot that holds what the iterator gave; no task writes it."""

RESULT = "step_result"
"""The slot that ``progress`` returns."""


@dataclass(frozen=True, slots=True)
class DataSlot:
    """The slot ``name`` of the batch that is ``batch_offset`` ahead; a value (seed section 3.1).

    A task reads and writes the slots of its own batch, so its slots have its lookahead as their
    offset. A bare name among ``Task(reads=...)`` or ``writes`` stands for that slot.

    Attributes:
        name: Any non-empty string.
        batch_offset: Batches ahead of the one that ``progress`` returns.

    Raises:
        TypeError: ``name`` is no string, or ``batch_offset`` no integer.
        ValueError: ``name`` is empty.
    """

    name: str
    batch_offset: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a slot's name is a string, not {shown(self.name)}")
        if not self.name:
            raise ValueError("a slot needs a name: DataSlot('batch_gpu')")
        if type(self.batch_offset) is not int:
            raise TypeError(
                f"slot {self.name!r}: batch_offset is {shown(self.batch_offset)}: give an integer"
            )


_APART = {name: f"slot {name}" for name in ("batch", "iter_idx", *dir(IterContext))}
_ATTRIBUTES = {**_APART, BATCH: "batch"}
"""Slot to attribute, where they differ."""

_NAMES = {attribute: name for name, attribute in _ATTRIBUTES.items()}


class Slots:
    """The slots of one batch."""

    __slots__ = ("_iteration",)

    def __init__(self, iteration: IterContext) -> None:
        self._iteration = iteration

    def __getitem__(self, name: str) -> Any:
        """The value; KeyError if the slot is empty."""
        try:
            return getattr(self._iteration, _ATTRIBUTES.get(name, name))
        except AttributeError:
            # The names without their values, which is no read of them.
            there = [_NAMES.get(n, n) for n in object.__getattribute__(self._iteration, "__dict__")]
            held = listed(sorted(n for n in there if n != "iter_idx"))
            raise KeyError(
                f"slot {shown(name)} of this batch is empty (it has: {held}). Add it to the "
                "task's reads, and to the writes of the task that sets it"
            ) from None

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or ``default`` if the slot is empty."""
        return getattr(self._iteration, _ATTRIBUTES.get(name, name), default)

    def set(self, name: str, value: Any) -> None:
        """Fill a slot; ``batch_cpu`` is a ValueError."""
        if name == BATCH:
            raise ValueError(
                f"slot {BATCH!r} is what the iterator gave, and no task writes it: use another "
                "name, such as 'batch_gpu'"
            )
        setattr(self._iteration, _ATTRIBUTES.get(name, name), value)

    def __contains__(self, name: object) -> bool:
        return self.get(name, _EMPTY) is not _EMPTY if isinstance(name, str) else False

    def __repr__(self) -> str:
        return f"Slots({self._iteration!r})"


_EMPTY = object()


class TaskPlace(NamedTuple):
    """What a task's context is made with; ``first`` gives the run's first iteration's number."""

    stream_pool: StreamPool
    first: Callable[[], int]
    stage: int


class TaskContext:
    """What ``Task.run`` gets.

    Attributes:
        slots: The slots of the task's batch: ``ctx.slots["x"]``, ``get``, ``set``, ``in``.
    """

    __slots__ = ("_iteration", "_place", "slots")

    def __init__(self, iteration: IterContext, place: TaskPlace) -> None:
        self.slots = Slots(iteration)
        self._iteration = iteration
        self._place = place

    @property
    def stream_pool(self) -> StreamPool:
        """The pipeline's streams."""
        return self._place.stream_pool

    @property
    def iter_count(self) -> int:
        """The number of this period, from 0 for each iterator; not the batch's number."""
        return self._iteration.iter_idx - self._place.first() + self._place.stage

    def __repr__(self) -> str:
        return f"TaskContext({self._iteration!r})"


class PeriodContext:
    """What an executor's ``execute_stage`` gets: the contexts of the tasks that run."""

    def __init__(self, contexts: Mapping[str, TaskContext]) -> None:
        self._contexts = contexts

    def of(self, task: Any) -> TaskContext:
        """The context that the task's ``run`` gets; for tasks that run in this period."""
        return self._contexts[task.name]
