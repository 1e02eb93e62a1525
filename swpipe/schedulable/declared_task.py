"""A task of a schedule: what to compute, how far ahead, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntFlag
from typing import Any, Self, TypeAlias

from swpipe.core.messages import shown
from swpipe.core.plan import MOST_ITERATIONS
from swpipe.core.task import LABEL_RULE, NAME_RULE, DeclaredIO, PipelineTask, is_label, is_name
from swpipe.schedulable.slot_context import DataSlot, TaskContext
from swpipe.schedulable.stream_pool import DEFAULT

SlotRef: TypeAlias = str | DataSlot
Earlier: TypeAlias = str | tuple[str, int]


class SameProgressSyncSide(IntFlag):
    """What waits for the tasks in ``same_progress_sync``."""

    CPU = 1
    GPU = 2
    BOTH = 3


class Task:
    """One unit of work of a schedule (seed section 3.1).

    All arguments may as well be attributes of a subclass, which defines ``run(ctx)``;
    ``Task.from_fn`` takes a function instead. Entries in ``reads`` and ``writes`` are slots or
    their names; those of the three ways to wait are names of tasks, each in one of them.

    Args:
        name: Unique in a schedule.
        stream: A name in the ``StreamPool``.
        priority: Kept, and orders nothing.
        lookahead: How many batches ahead of the one that ``progress`` returns; 0 to 999.
        reads: Slots of the task's batch that it uses; it waits for the tasks that write them.
        writes: Slots of its batch that it sets.
        depends_on: It waits for these tasks, on the same batch.
        cross_iter_depends_on: It waits for these on an earlier batch: ``("x", -2)`` two before;
            ``"x"`` is ``("x", -1)``.
        same_progress_sync: It waits for these in the same period, whatever their batches are.
        same_progress_sync_sides: What waits for them: the host, and with ``GPU`` the stream, too.
            An event is waited for after it was recorded, so ``GPU`` alone means ``BOTH`` here.
        nccl: Submit such tasks one at a time, in the same order on every rank.
        nvtx_tag: Name of a further NVTX range, within that of the task.
        io: As for ``PipelineTask``.
        random: As for ``PipelineTask``.
        pure: As for ``PipelineTask``.

    Raises:
        TypeError: An entry is of the wrong kind, or ``run`` is missing or asynchronous.
        ValueError: The name is missing, a lookahead is negative, an offset is not, or a task is
            named in two ways to wait.
    """

    name: str = ""
    stream: str = DEFAULT
    priority: int = 0
    lookahead: int = 0
    reads: Sequence[Any] = ()
    writes: Sequence[Any] = ()
    depends_on: Sequence[str] = ()
    cross_iter_depends_on: Sequence[Any] = ()
    same_progress_sync: Sequence[str] = ()
    same_progress_sync_sides: SameProgressSyncSide = SameProgressSyncSide.BOTH
    nccl: bool = False
    nvtx_tag: str | None = None
    io: Sequence[DeclaredIO] = ()
    random: bool = False
    pure: bool = False

    def __init__(
        self,
        name: str | None = None,
        *,
        stream: str | None = None,
        priority: int | None = None,
        lookahead: int | None = None,
        reads: Iterable[SlotRef] | None = None,
        writes: Iterable[SlotRef] | None = None,
        depends_on: Iterable[str] | None = None,
        cross_iter_depends_on: Iterable[Earlier] | None = None,
        same_progress_sync: Iterable[str] | None = None,
        same_progress_sync_sides: SameProgressSyncSide | int | None = None,
        nccl: bool | None = None,
        nvtx_tag: str | None = None,
        io: Iterable[DeclaredIO] | None = None,
        random: bool | None = None,
        pure: bool | None = None,
    ) -> None:
        given = locals()
        values = {f: getattr(self, f) if given[f] is None else given[f] for f in _FIELDS}
        self.__dict__.update(_checked(values))
        if type(self).run is Task.run:
            raise TypeError(
                f"task {self.name!r} does nothing: define run(ctx) in a subclass, or write "
                f"Task.from_fn({self.name!r}, fn)"
            )
        PipelineTask(self.name, self.run, self.io, self.random, self.pure)  # what it refuses

    @classmethod
    def from_fn(cls, name: str, fn: Callable[[TaskContext], Any], **fields: Any) -> Self:
        """A task that calls ``fn(ctx)``; the other arguments are those of ``Task``.

        Raises:
            TypeError: ``fn`` cannot be called; otherwise as for ``Task``.
        """
        if not callable(fn):
            raise TypeError(f"task {shown(name)}: fn is {shown(fn)}: give a function of ctx")
        made: Self = type(cls.__name__, (cls,), {"run": staticmethod(fn)})(name, **fields)
        return made

    def init(self, ctx: TaskContext) -> None:
        """Called once, when a pipeline is made of the schedule; the slots are empty."""

    def run(self, ctx: TaskContext) -> None:
        """The work on one batch."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIELDS and "same_progress_sync" in self.__dict__:
            raise AttributeError(
                f"task {self.name!r}: {name} is read-only once the task is made: make another task"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"<Task {self.name!r}, lookahead {self.lookahead}>"


_FIELDS = tuple(Task.__annotations__)
_WAITS = ("depends_on", "cross_iter_depends_on", "same_progress_sync")

_KINDS: dict[str, tuple[type, str]] = {
    "stream": (str, "a string"),
    "priority": (int, "an integer"),
    "lookahead": (int, "an integer"),
    "nccl": (bool, "True or False"),
    "nvtx_tag": (str, "a string"),
    "random": (bool, "True or False"),
    "pure": (bool, "True or False"),
}
_ENTRIES: dict[str, tuple[tuple[type, ...], str]] = {
    "reads": ((DataSlot, str), "give slots or their names"),
    "writes": ((DataSlot, str), "give slots or their names"),
    "depends_on": ((str,), "give names of tasks"),
    "cross_iter_depends_on": ((str, tuple, list), "give the name of a task, or (name, -batches)"),
    "same_progress_sync": ((str,), "give names of tasks"),
    "io": ((DeclaredIO,), "give DeclaredIOs"),
}


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a task in their one form.

    Raises:
        TypeError, ValueError: As for ``Task``.
    """
    name = values["name"]
    if name == "":
        raise ValueError("a task needs a name: Task('forward', ...), or name = in the subclass")
    if not isinstance(name, str):
        raise TypeError(f"a task's name is a string, not {shown(name)}")
    if not is_name(name):
        raise ValueError(f"task name {shown(name)}: {NAME_RULE}")
    where = f"task {name!r}"
    for field, (kind, what) in _KINDS.items():
        value = values[field]
        if type(value) is not kind and not (field == "nvtx_tag" and value is None):
            raise TypeError(f"{where}: {field} is {shown(value)}: give {what}")
    if not is_label(values["stream"]):
        raise ValueError(f"{where}: stream {shown(values['stream'])}: {LABEL_RULE}")
    lookahead = values["lookahead"]
    if not 0 <= lookahead < MOST_ITERATIONS:
        raise ValueError(
            f"{where}: lookahead is {lookahead}: give 0 for the batch that progress() returns, or "
            f"how many batches ahead of it, up to {MOST_ITERATIONS - 1}"
        )
    sides = values["same_progress_sync_sides"]
    if not isinstance(sides, int) or not 0 < sides <= SameProgressSyncSide.BOTH:
        raise ValueError(
            f"{where}: same_progress_sync_sides is {shown(sides)}, which has unknown bits, or "
            "none: give SameProgressSyncSide.CPU, GPU or BOTH"
        )
    lists = {field: _entries(where, field, values[field]) for field in _ENTRIES}
    for field in ("reads", "writes"):
        lists[field] = [DataSlot(s, lookahead) if isinstance(s, str) else s for s in lists[field]]
    lists["cross_iter_depends_on"] = [_earlier(where, e) for e in lists["cross_iter_depends_on"]]
    _refuse_twice(where, lists)
    tuples = {
        field: tuple(dict.fromkeys(entries) if field in _WAITS else entries)
        for field, entries in lists.items()
    }
    return {**values, **tuples, "same_progress_sync_sides": SameProgressSyncSide(sides)}


def _entries(where: str, field: str, given: Any) -> list[Any]:
    if isinstance(given, str | DataSlot | DeclaredIO) or not isinstance(given, Iterable):
        raise TypeError(f"{where}: {field} is {shown(given)}: give a tuple, ({shown(given)},)")
    kinds, rule = _ENTRIES[field]
    for entry in (entries := [*given]):
        if not isinstance(entry, kinds):
            raise TypeError(f"{where}: {field} has {shown(entry)}: {rule}")
    return entries


def _refuse_twice(where: str, lists: dict[str, list[Any]]) -> None:
    found: dict[str, str] = {}
    for field in _WAITS:
        for entry in lists[field]:
            producer = entry if isinstance(entry, str) else entry[0]
            if (other := found.setdefault(producer, field)) != field:
                raise ValueError(
                    f"{where}: {producer!r} is in {other} and in {field}, which say different "
                    "things: keep one of them"
                )


def _earlier(where: str, entry: Any) -> tuple[str, int]:
    if isinstance(entry, str):
        return entry, -1
    field, (_, rule) = "cross_iter_depends_on", _ENTRIES["cross_iter_depends_on"]
    if len(entry) != 2 or not isinstance(entry[0], str) or type(entry[1]) is not int:
        raise TypeError(f"{where}: {field} has {shown(entry)}: {rule}")
    if not -MOST_ITERATIONS <= entry[1] < 0:
        raise ValueError(
            f"{where}: {field} has {shown(entry)}: offsets are -1, the batch before, down to "
            f"{-MOST_ITERATIONS}; the same batch is depends_on"
        )
    return entry[0], entry[1]
