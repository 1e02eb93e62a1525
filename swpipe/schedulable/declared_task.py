"""Tasks of a schedule: the function, the lookahead, and the tasks to wait for.

Task("copy", lookahead=1)  or  class Copy(Task): lookahead = 1
          argument, or else attribute of the class
    └── rule of the field (_VALUES, _ENTRIES): checks it, returns its normal form
          └── attribute of the task, read-only
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntFlag
from functools import partial
from types import UnionType
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

from swpipe.core.messages import listed, shown
from swpipe.core.plan import MOST_ITERATIONS
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.schedulable.slot_context import DataSlot, TaskContext
from swpipe.schedulable.stream_pool import DEFAULT


class SameProgressSyncSide(IntFlag):
    """The side that waits in ``same_progress_sync``: the host, the stream, both, or none."""

    NONE = 0
    CPU = 1
    GPU = 2
    BOTH = 3


class SameProgressSync(NamedTuple):
    """A wait for another task in the same period, and the side that waits."""

    task: str
    sides: SameProgressSyncSide = SameProgressSyncSide.BOTH


Side: TypeAlias = SameProgressSyncSide | int | str
SlotRef: TypeAlias = str | DataSlot
Earlier: TypeAlias = str | tuple[str, int]
Sync: TypeAlias = str | tuple[str, Side] | Mapping[str, Any]


class TaskFields(TypedDict, total=False):
    """The arguments of ``Task`` besides the name."""

    stream: str
    priority: int
    lookahead: int
    reads: SlotRef | Iterable[SlotRef]
    writes: SlotRef | Iterable[SlotRef]
    depends_on: str | Iterable[str]
    cross_iter_depends_on: str | Iterable[Earlier]
    same_progress_sync: Sync | Iterable[Sync]
    same_progress_sync_sides: Side
    nccl: bool
    nvtx_tag: str | None
    io: DeclaredIO | Iterable[DeclaredIO]
    random: bool
    pure: bool


class Task:
    """A unit of work of a schedule (seed section 3.1).

    Each argument can also be an attribute of a subclass that defines ``run(ctx)``.
    ``Task.from_fn`` takes a function instead. Entries in ``reads`` and ``writes`` are slots or
    names of slots. ``depends_on``, ``cross_iter_depends_on`` and ``same_progress_sync`` name tasks;
    a task may be named in only one of these fields. A single entry needs no tuple.

    Args:
        name: Unique in a schedule.
        stream: A name in the ``StreamPool``.
        priority: Stored, but does not affect the order.
        lookahead: The number of batches ahead of the batch that ``progress`` returns; 0 to 999.
        reads: The slots of its batch that the task uses; it waits for the tasks that write them.
        writes: The slots of its batch that the task sets.
        depends_on: The tasks to wait for on the same batch.
        cross_iter_depends_on: The tasks to wait for on an earlier batch. ``("x", -2)`` is task x on
            the batch two before; ``"x"`` is ``("x", -1)``.
        same_progress_sync: The tasks to wait for in the same period, whatever their batches are. An
            entry is a name, ``("x", side)`` or ``{"task": "x", "sides": side}``.
        same_progress_sync_sides: The side of entries without a side: a ``SameProgressSyncSide`` or
            its name. With ``CPU`` the host waits. With ``GPU`` the stream waits, and the host until
            the event is recorded, since only a recorded event can be waited for. ``NONE`` disables
            the wait.
        nccl: Whether the task is globally ordered: submitted one at a time, in the same order on
            every rank.
        nvtx_tag: The name of an additional NVTX range inside the task's range.
        io, random, pure: See ``PipelineTask``.

    Raises:
        TypeError: An argument is of the wrong kind, or ``run`` is missing or asynchronous.
        ValueError: The name is missing, a lookahead is negative, an offset is not, a side has
            unknown bits, or a task is named in two ways to wait.
    """

    name: str = ""
    stream: str = DEFAULT
    priority: int = 0
    lookahead: int = 0
    reads: Sequence[Any] = ()
    writes: Sequence[Any] = ()
    depends_on: Sequence[str] = ()
    cross_iter_depends_on: Sequence[Any] = ()
    same_progress_sync: Sequence[Any] = ()
    same_progress_sync_sides: SameProgressSyncSide = SameProgressSyncSide.BOTH
    nccl: bool = False
    nvtx_tag: str | None = None
    io: Sequence[DeclaredIO] = ()
    random: bool = False
    pure: bool = False

    def __init__(self, name: str | None = None, **fields: Unpack[TaskFields]) -> None:
        name = self.name if name is None else name
        if name == "":
            raise ValueError("a task needs a name: Task('forward', ...), or name = in the subclass")
        task = f"task {shown(name)}"
        if unknown := fields.keys() - _FIELDS:
            raise TypeError(f"{task}: unknown fields {listed(unknown)}: they are {listed(_FIELDS)}")
        # Attributes of the subclass are the defaults of the arguments.
        given = {field: getattr(self, field) for field in _FIELDS}
        # None means that an argument is not given, so it does not hide a subclass's attribute.
        given.update((field, value) for field, value in fields.items() if value is not None)
        # Values before entries: a slot's normal form needs the task's lookahead, and that of a sync
        # needs the default side.
        values: dict[str, Any] = {}
        for field, check in _VALUES.items():
            values[field] = check(f"{task}: {field} is {shown(given[field])}", given[field])
        for field, form in _ENTRIES.items():
            values[field] = tuple(
                form(f"{task}: {field} has {shown(entry)}", entry, values)
                for entry in _each(f"{task}: {field}", given[field])
            )
        _check_named_once(task, values)
        # Written directly, because ``__setattr__`` makes these attributes read-only.
        self.__dict__.update(name=name, **values)
        # Without an override or a given function, ``run`` is still the placeholder.
        if getattr(self.run, "__func__", None) is Task.run:
            raise TypeError(
                f"{task} does nothing: define run(ctx) in a subclass, or write "
                f"Task.from_fn({name!r}, fn)"
            )
        # Refuses other names that a plan's task cannot have, and functions that it cannot run.
        PipelineTask(name, self.run, self.io, self.random, self.pure)

    @staticmethod
    def from_fn(name: str, fn: Callable[[TaskContext], Any], **fields: Unpack[TaskFields]) -> Task:
        """Return a task that calls ``fn(ctx)``; see ``Task`` for the other arguments.

        Raises:
            TypeError: ``fn`` cannot be called; otherwise as for ``Task``.
        """
        return FunctionTask(name, fn, **fields)

    def init(self, ctx: TaskContext) -> None:
        """Prepare the task; a pipeline calls this once when it is created, with empty slots."""

    def run(self, ctx: TaskContext) -> None:
        """Process one batch."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        # A pipeline translates the fields into a plan when it is created. A later change would be
        # ignored, and two pipelines of one task would differ.
        if name in vars(self) and (name in _FIELDS or name == "name"):
            raise AttributeError(
                f"task {self.name!r}: {name} is read-only once the task is made: make another task"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"<Task {self.name!r}, lookahead {self.lookahead}>"


class FunctionTask(Task):
    """A task that calls a function."""

    def __init__(
        self, name: str, fn: Callable[[TaskContext], Any], **fields: Unpack[TaskFields]
    ) -> None:
        self.__dict__["run"] = fn  # itself, so that an asynchronous function is recognized
        super().__init__(name, **fields)


# Arguments of the functions below: the beginning of the error message ("task 'copy': lookahead is
# -1"), the value or one of its entries, and, for an entry, the fields that were checked before it.


def _of(kinds: type | UnionType, what: str, place: str, value: Any, _: object = None) -> Any:
    # bool is a subclass of int, but True is not a number of batches.
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise TypeError(f"{place}: give {what}")
    return value


def _lookahead(place: str, value: Any) -> Any:
    if not 0 <= _of(int, "an integer", place, value) < MOST_ITERATIONS:
        raise ValueError(
            f"{place}: give 0 for the batch that progress() returns, or how many batches ahead of "
            f"it, up to {MOST_ITERATIONS - 1}"
        )
    return value


def _side(place: str, value: Any) -> SameProgressSyncSide:
    if isinstance(value, str) and value.upper() in SameProgressSyncSide.__members__:
        return SameProgressSyncSide[value.upper()]
    if isinstance(value, int) and 0 <= value <= SameProgressSyncSide.BOTH:
        return SameProgressSyncSide(value)
    raise ValueError(
        f"{place}, which has unknown bits or is no side: give SameProgressSyncSide.CPU, GPU, BOTH "
        "or NONE, or one of these names"
    )


def _each(place: str, value: Any) -> Iterable[Any]:
    # Strings and mappings are iterable, but each of them is a single entry.
    if isinstance(value, str | DataSlot | DeclaredIO | Mapping):
        return (value,)
    return _of(Iterable, "a tuple", f"{place} is {shown(value)}", value)  # type: ignore[no-any-return]


def _slot(place: str, entry: Any, fields: dict[str, Any]) -> DataSlot:
    if isinstance(entry, str):
        return DataSlot(entry, fields["lookahead"])
    return _of(DataSlot, "slots or their names", place, entry)  # type: ignore[no-any-return]


def _earlier(place: str, entry: Any, fields: dict[str, Any]) -> tuple[str, int]:
    match (entry, -1) if isinstance(entry, str) else entry:
        case (str(task), int(offset)) if -MOST_ITERATIONS <= offset < 0:
            return task, offset
        # The type is right, so this is a wrong value; anything else is a wrong type.
        case (str(), int()):
            raise ValueError(
                f"{place}: offsets are -1, the batch before, down to {-MOST_ITERATIONS}; the same "
                "batch is depends_on"
            )
    raise TypeError(f"{place}: give the name of a task, or (name, -batches)")


def _sync(place: str, entry: Any, fields: dict[str, Any]) -> SameProgressSync:
    match entry:
        case str():
            return SameProgressSync(entry, fields["same_progress_sync_sides"])
        # A ``SameProgressSync`` matches here as well, since it is a tuple.
        case (str(task), side):
            return SameProgressSync(task, _side(f"{place}: the side is {shown(side)}", side))
        case {"task": str(task), **rest} if rest.keys() <= {"sides"}:
            return _sync(place, (task, *rest.values()) if rest else task, fields)
    raise TypeError(
        f"{place}: give names of tasks, (name, side) or {{'task': name, 'sides': side}}"
    )


def _check_named_once(task: str, values: dict[str, Any]) -> None:
    """Refuse a task that is named in two of the waiting fields, and drop repeated entries."""
    field_of: dict[str, str] = {}
    for field in ("depends_on", "cross_iter_depends_on", "same_progress_sync"):
        # A dict removes duplicates and keeps the order of declaration; a set would not keep it.
        values[field] = tuple(dict.fromkeys(values[field]))
        for entry in values[field]:
            producer = entry if isinstance(entry, str) else entry[0]
            other = field_of.setdefault(producer, field)
            if other != field:
                raise ValueError(
                    f"{task}: {producer!r} is in {other} and in {field}, which say different "
                    "things: keep one of them"
                )


_flag = partial(_of, bool, "True or False")

_VALUES: dict[str, Callable[[str, Any], Any]] = {
    "stream": partial(_of, str, "a string"),
    "priority": partial(_of, int, "an integer"),
    "lookahead": _lookahead,
    "same_progress_sync_sides": _side,
    "nccl": _flag,
    "nvtx_tag": partial(_of, str | None, "a string"),
    "random": _flag,
    "pure": _flag,
}
"""The function that checks a field's value and returns its normal form, by field."""

_ENTRIES: dict[str, Callable[[str, Any, dict[str, Any]], Any]] = {
    "reads": _slot,
    "writes": _slot,
    "depends_on": partial(_of, str, "names of tasks"),
    "cross_iter_depends_on": _earlier,
    "same_progress_sync": _sync,
    "io": partial(_of, DeclaredIO, "DeclaredIOs"),
}
"""The function that checks one entry of a field and returns its normal form, by field."""

_FIELDS = _VALUES | _ENTRIES
