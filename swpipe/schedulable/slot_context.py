"""The context of a task of a schedule: slots of its batch, events, streams and the period.

A slot is an attribute of the iteration's context, so that replay, recordings and the engine's
memory management see it. A slot whose name every context already has as an attribute is renamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from swpipe.core.context import IterContext
from swpipe.core.messages import listed, shown
from swpipe.device import Event
from swpipe.pipeline import SWPipeline
from swpipe.schedulable.stream_pool import StreamPool

BATCH = "batch_cpu"
"""The slot that holds the batch from the iterator; no task writes it."""

RESULT = "step_result"
"""The slot whose value ``progress`` returns."""


@dataclass(frozen=True, slots=True)
class DataSlot:
    """The slot ``name`` of the batch that is ``batch_offset`` ahead (seed section 3.1).

    A task reads and writes the slots of its own batch, so the offset of its slots is its lookahead.
    A bare name in ``reads`` or ``writes`` of a task is the slot with this offset.

    Attributes:
        name: Any non-empty string.
        batch_offset: The number of batches ahead of the batch that ``progress`` returns.

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
        # Not ``isinstance``: True is an int, but no offset.
        if type(self.batch_offset) is not int:
            raise TypeError(
                f"slot {self.name!r}: batch_offset is {shown(self.batch_offset)}: give an integer"
            )


# The new name has a space, which no attribute defined by a context has.
_APART = {name: f"slot {name}" for name in ("batch", "iter_idx", *dir(IterContext))}
_ATTRIBUTES = {**_APART, BATCH: "batch"}
"""The attributes of slots whose attribute has another name, by the slot's name."""

_EVENT = "event "
"""The prefix of the attributes that hold events."""

# The reverse of the renaming, so that messages show the names that the user has chosen.
_NAMES = {attribute: name for name, attribute in _ATTRIBUTES.items()}


class Slots:
    """The slots of one batch."""

    __slots__ = ("_iteration",)

    def __init__(self, iteration: IterContext) -> None:
        self._iteration = iteration

    def __getitem__(self, name: str) -> Any:
        """Return the value of a slot; raise KeyError if it is empty."""
        try:
            return getattr(self._iteration, _ATTRIBUTES.get(name, name))
        except AttributeError:
            # Only the names are listed here: a recording counts ``getattr`` as a read.
            filled = object.__getattribute__(self._iteration, "__dict__")
            held = listed(sorted(_NAMES.get(n, n) for n in filled if n != "iter_idx"))
            raise KeyError(
                f"slot {shown(name)} of this batch is empty (it has: {held}). Add it to the "
                "task's reads, and to the writes of the task that sets it"
            ) from None

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a slot, or ``default`` if it is empty."""
        return getattr(self._iteration, _ATTRIBUTES.get(name, name), default)

    def set(self, name: str, value: Any) -> None:
        """Set the value of a slot; raise ValueError for ``batch_cpu``."""
        if name == BATCH:
            raise ValueError(
                f"slot {BATCH!r} is what the iterator gave, and no task writes it: use another "
                "name, such as 'batch_gpu'"
            )
        # By ``setattr``, so that a recording logs the write.
        setattr(self._iteration, _ATTRIBUTES.get(name, name), value)

    def __contains__(self, name: object) -> bool:
        # Not by comparison with None, which is a possible value of a slot.
        return self.get(name, _EMPTY) is not _EMPTY if isinstance(name, str) else False

    def __repr__(self) -> str:
        return f"Slots({self._iteration!r})"


_EMPTY = object()


class Home:
    """The pipeline that runs a schedule.

    Attributes:
        pipe: A weak reference to the pipeline, so that tasks do not keep it alive; it is set when
            the pipeline has been made from the tasks.
    """

    pipe: SWPipeline[Any]


class TaskPlace(NamedTuple):
    """The streams and the pipeline that run a task, and the task's stage in the plan."""

    stream_pool: StreamPool
    home: Home
    stage: int


class TaskContext:
    """The argument of ``Task.run``.

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
        """The number of this period, from 0 for each iterator; not the number of the batch."""
        # A task of stage s runs on iteration p - s in period p.
        return self._iteration.iter_idx - self._place.home.pipe.next_iteration + self._place.stage

    def record_event(self, name: str) -> Event:
        """Mark the work that the task has submitted so far, and return the event.

        Tasks of the same batch can wait for it. The event is a value of the batch, like a slot.
        """
        device = self._place.home.pipe.device
        event = device.new_event()
        event.record(device.current_stream())
        # On the batch's context: it is found by tasks of this batch only, and freed with it.
        setattr(self._iteration, _EVENT + name, event)
        return event

    def wait_event(self, name: str) -> bool:
        """Make the current stream wait for an event; return whether it was recorded yet.

        The host must know that the event is recorded. Name the task that records it in
        ``depends_on``, or in ``same_progress_sync`` with the side ``CPU``.
        """
        event = getattr(self._iteration, _EVENT + name, None)
        # An event that was never recorded cannot be waited for; the caller decides what to do.
        if event is None:
            return False
        event.wait(self._place.home.pipe.device.current_stream())
        return True

    def __repr__(self) -> str:
        return f"TaskContext({self._iteration!r})"


class PeriodContext(dict[str, TaskContext]):
    """The contexts of the tasks that run in a period, by name, for ``execute_stage``."""

    def of(self, task: Any) -> TaskContext:
        """Return the context to pass to a task's ``run``; the task must run in this period."""
        return self[task.name]
