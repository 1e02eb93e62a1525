"""Plans: stages, streams, thread groups, order and dependences of tasks, as pure data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeAlias, get_origin, get_type_hints

import torch

from swpipe.core.files import read_text, read_typed, write_atomically
from swpipe.core.messages import shown
from swpipe.core.task import (
    LABEL_RULE,
    NAME_RULE,
    ByTask,
    PipelineTask,
    TaskRef,
    is_label,
    is_name,
    refs_in,
)
from swpipe.errors import PlanError, Problem

PULL = "<pull>"
"""The name of the loader's call, in costs, traces and programs."""

BODY = "<body>"
"""The name of the caller's code between two calls of ``progress()``, in tables of effects."""

OTHERS = (PULL, BODY)
"""The names of what runs beside the tasks."""

HOST = "<host>"
"""The stream of a task of the host alone, which has none: see ``TaskSchedule.stream``."""

DEFAULT_GROUP = "default"
"""The thread group of the caller of ``progress()``."""

MOST_ITERATIONS = 1_000
"""The largest depth, distance of a dependence, and shift of a read; stages are smaller."""

MOST_TASKS = 10_000
MOST_WORK = 100_000
"""The largest value of tasks x (stages + largest distance) + dependences: more work takes too long
to compile."""
DEFAULT_RUN_AHEAD = 1
"""Iterations. When a period begins, the device has at most the launched work of a whole iteration
left. With less, host and device wait for each other; with more, memory that streams share is freed
later."""

StreamRef: TypeAlias = str | torch.Stream | None
Pair: TypeAlias = tuple[str, str]
DistantPair: TypeAlias = tuple[str, str, int]


def is_host(stream: StreamRef) -> bool:
    """Return whether this is ``HOST``; a ``torch.Stream`` must not be compared with a string."""
    return isinstance(stream, str) and stream == HOST


@dataclass(frozen=True, slots=True)
class TaskSchedule:
    """Where and when one task runs.

    Attributes:
        stage: How many periods after an iteration is admitted the task runs on it; 0 to 999.
        stream: The name of a stream, or a ``torch.Stream``; None is the current stream of the
            caller of ``progress()``; ``swpipe.HOST`` says that the task works on the host alone: it
            launches nothing, and uses no result of device work, though it may pass one on. It has
            no event, so that no task waits for the stream that it would have had. Tasks after it
            wait for the device work that it comes after. Ignored on a device without streams.
        thread_group: The host thread that submits the task; ``"default"`` is the caller's own.
        globally_ordered: Whether to submit the task in the same order on every rank, one at a time
            with all other tasks that set this: for collectives, and for tasks that launch them,
            such as backward under DDP.
        workers: The number of threads of the group. Thread number i modulo ``workers`` runs
            iteration i in all of the group's tasks, which have one stage and the same number here.
            So a task may take as many periods. For tasks that do not depend on the previous
            iteration.
    """

    stage: int = 0
    stream: StreamRef = None
    thread_group: str = DEFAULT_GROUP
    globally_ordered: bool = False
    workers: int = 1


def streams_of(entries: Iterable[TaskSchedule]) -> dict[StreamRef, None]:
    """Return the streams that tasks name, in the order of the tasks, without ``HOST``."""
    # As a key: a ``torch.Stream`` takes whatever it is compared with for a stream.
    streams = [entry.stream for entry in entries]
    named: dict[StreamRef, None] = {s: None for s in streams if isinstance(s, str | torch.Stream)}
    named.pop(HOST, None)
    return named


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """The properties of a named stream.

    Attributes:
        priority: -128 to 127; as in CUDA, work on a stream with a lower number runs first.
    """

    priority: int = 0


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A complete plan, which stores the names of tasks; tasks may be given as objects or by name.

    In each pair the consumer comes first, and runs after the producer.

    Attributes:
        schedule: Task to ``TaskSchedule``, in declaration order. A task and its name are one key.
        deps: (consumer, producer), on the same iteration.
        cross_iter_deps: (consumer, producer[, distance]): the consumer on iteration i runs after
            the producer on iteration i - distance; 1 to 1,000 iterations, by default 1.
        same_period_deps: (consumer, producer), in the same period, on any iterations.
        host_only: (consumer, producer) of the edges above that order the two functions alone: the
            consumer's stream does not wait for the producer's work. For values that Python uses on
            the host, such as a counter.
        order: Tasks in the order in which they run within a period, as far as the dependences
            leave it open; it must not contradict them, and need not name every task.
        streams: Stream name to ``StreamSpec``, for streams that differ from the default.
        pipeline_depth: How many iterations may be in flight; None is the minimum, ``least_depth``.
            Each further iteration lets worker groups run one period further ahead of the caller.
            At most 1,000.
        pull_group: The thread group that calls the loader, one iteration before the tasks need the
            batch, also between two calls of ``progress()``. The plan's author declares by it that
            the loader reads nothing that code in between may change. It is a group of its own, or
            one that tasks have. None: the caller's thread calls the loader, at the beginning of an
            iteration.
        stale: State to a number of iterations: tasks that only read the state may find it that
            much older than in a serial run. It changes no order; ``swpipe.analysis.verification``
            refuses any other staleness.
        newer: State to a number of iterations: these tasks may find the state that much newer. A
            task that looks at later batches, as far as they are pulled, reads a newer state.
        within_calls: Whether worker groups run within the caller's calls only: in each period they
            begin when the call does, and the call returns when they have done their tasks of the
            period. Otherwise they also run between two calls.
        keep: Attributes of the context that are read after the iteration; all others are deleted as
            soon as no task can use them any more (``swpipe.analysis.last_readers``). What a task
            uses is taken from its ``reads``, or from the pipeline's ``effects``. None: all stay.
        run_ahead: How far the host may launch ahead of a device with streams, 0 to 1,000
            iterations: an iteration is admitted when the device has finished the one
            ``depth + run_ahead`` before it. ``depth`` limits the number of contexts; ``run_ahead``
            limits the memory that several streams use, which an allocator can reuse only when the
            device is done with it. None: 1, or no limit if no task names a stream, as in a plain
            loop.
        tasks: The tasks, if they were given here or as keys of ``schedule``; not saved.

    Raises:
        PlanError: An entry does not have the form above. All other rules are checked when a
            pipeline is built.
    """

    schedule: Mapping[str, TaskSchedule]
    deps: Sequence[Pair] = ()
    cross_iter_deps: Sequence[DistantPair] = ()
    same_period_deps: Sequence[Pair] = ()
    host_only: Sequence[Pair] = ()
    order: Sequence[str] = ()
    streams: Mapping[str, StreamSpec] = field(default_factory=dict)
    pipeline_depth: int | None = None
    pull_group: str | None = None
    stale: Mapping[str, int] = field(default_factory=dict)
    newer: Mapping[str, int] = field(default_factory=dict)
    within_calls: bool = False
    keep: Sequence[str] | None = None
    run_ahead: int | None = None
    tasks: tuple[PipelineTask, ...] = field(default=(), compare=False, repr=False)

    def __init__(
        self,
        schedule: Mapping[Any, TaskSchedule],
        deps: Iterable[Sequence[TaskRef]] = (),
        cross_iter_deps: Iterable[Sequence[TaskRef | int]] = (),
        same_period_deps: Iterable[Sequence[TaskRef]] = (),
        host_only: Iterable[Sequence[TaskRef]] = (),
        order: Iterable[TaskRef] = (),
        streams: Mapping[str, StreamSpec] | None = None,
        pipeline_depth: int | None = None,
        pull_group: str | None = None,
        stale: Mapping[str, int] | None = None,
        newer: Mapping[str, int] | None = None,
        within_calls: bool = False,
        keep: Iterable[str] | None = None,
        run_ahead: int | None = None,
        tasks: Iterable[PipelineTask] = (),
    ) -> None:
        # All problems are raised at once, so that a plan need not be mended line by line.
        problems: list[Problem] = []
        values: dict[str, Any] = {
            "schedule": _schedule(schedule, problems),
            "deps": _edges("deps", deps, problems),
            "cross_iter_deps": _edges("cross_iter_deps", cross_iter_deps, problems),
            "same_period_deps": _edges("same_period_deps", same_period_deps, problems),
            "host_only": _edges("host_only", host_only, problems),
            "order": _order(order, problems),
            "streams": dict(streams or {}),
            "pipeline_depth": pipeline_depth,
            "pull_group": pull_group,
            "stale": _shifts("stale", stale or {}, problems),
            "newer": _shifts("newer", newer or {}, problems),
            "within_calls": within_calls,
            "keep": None if keep is None else _keep(keep, problems),
            "run_ahead": run_ahead,
            "tasks": _tasks([*tasks, *schedule], problems),
        }
        _check_names(values, problems)
        if problems:
            raise PlanError(problems)
        # A frozen dataclass: its own __setattr__ refuses.
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def serial(cls, tasks: Iterable[TaskRef]) -> Self:
        """Return a plan that runs all tasks in one stage on the caller's thread, in this order.

        Raises:
            TypeError: ``tasks`` is no list.
        """
        tasks = refs_in(tasks)
        return cls(schedule={task: TaskSchedule() for task in tasks}, order=tasks, pipeline_depth=1)

    @property
    def max_stage(self) -> int:
        """The last stage; -1 for a plan without tasks."""
        return max((s.stage for s in self.schedule.values()), default=-1)

    @property
    def most_workers(self) -> int:
        """The largest number of threads of a group."""
        return max((entry.workers for entry in self.schedule.values()), default=1)

    @property
    def least_depth(self) -> int:
        """The minimum number of iterations in flight.

        It is one for each stage, one that is being pulled, and one for each further worker.
        """
        # With w workers a task may take w periods, so w - 1 more iterations are in flight.
        return self.max_stage + self.most_workers + (self.pull_group is not None)

    def workers(self, group: str) -> int:
        """Return the number of threads of a group."""
        # Tasks of one group have the same number of workers; a group without tasks has one thread.
        counts = (e.workers for e in self.schedule.values() if e.thread_group == group)
        return next(counts, 1)

    @property
    def depth(self) -> int:
        """The maximum number of iterations in flight."""
        return self.least_depth if self.pipeline_depth is None else self.pipeline_depth

    @property
    def names_streams(self) -> bool:
        """Whether a task has a stream other than the caller's."""
        return bool({entry.stream for entry in self.schedule.values()} - {None, HOST})

    @property
    def launch_limit(self) -> int | None:
        """The limit of the run-ahead in iterations, the default filled in; None for no limit."""
        if self.run_ahead is None and self.names_streams:
            return DEFAULT_RUN_AHEAD
        return self.run_ahead

    @property
    def thread_groups(self) -> tuple[str, ...]:
        """The caller's group, then all other groups as tasks first name them, then the loader's."""
        # A dict keeps the order of first use and drops repetitions, unlike a set.
        groups = (DEFAULT_GROUP, *(s.thread_group for s in self.schedule.values()))
        return tuple(dict.fromkeys((*groups, *([self.pull_group] if self.pull_group else []))))

    @property
    def threads(self) -> int:
        """The number of threads of all groups together, including the caller's."""
        return sum(map(self.workers, self.thread_groups))

    # ------------------------------------------------------------------ files

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for TOML or JSON, without default values.

        Raises:
            TypeError: A task's stream is a ``torch.Stream``; only named streams can be saved.
        """
        for name, entry in self.schedule.items():
            # A stream object belongs to this process, and has no name to find it by in another.
            if isinstance(entry.stream, torch.Stream):
                raise TypeError(
                    f"task {shown(name)}: its stream is a torch.Stream object, which no file "
                    "can hold; name the stream instead and describe it in PipelinePlan.streams"
                )
        data = {key: _plain(getattr(self, key)) for key in _KEYS}
        empty: tuple[Any, ...] = (None, [], {})
        given = {k: v for k, v in data.items() if v not in empty and v is not False}
        if self.keep == ():  # keep nothing, which differs from the default, None
            given["keep"] = []
        return {"schedule": {}, **given}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a plan from plain data.

        Raises:
            PlanError: A key is unknown, a value has the wrong type, or the schedule is missing.
        """
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        problems: list[Problem] = []
        for key, value in data.items():
            # Of other lists, the constructor checks the entries, as in plans written in Python.
            if key not in _KEYS:
                text = f"unknown key {shown(key)} in the plan; known are {', '.join(_KEYS)}"
                problems.append(Problem(text))
            elif get_origin(hints[key]) is Mapping:
                try:
                    values[key] = read_typed(value, hints[key], key)
                except ValueError as error:
                    problems.append(Problem(str(error)))
            elif key in _SCALARS or isinstance(value, list):
                values[key] = value
            else:
                problems.append(Problem(f"{key} is {shown(value)}: it must be a list"))
        if "schedule" not in data:
            problems.append(Problem("the plan has no [schedule]: give each task an entry in it"))
        if problems:
            raise PlanError(problems)
        return cls(**values)

    def to_toml(self) -> str:
        """Return the plan as TOML; ``from_toml`` returns an equal plan."""
        import tomli_w  # writing is rare: not worth importing with the framework

        return tomli_w.dumps(self.to_dict())

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read a plan from TOML.

        Raises:
            tomllib.TOMLDecodeError: ``text`` is not TOML.
            PlanError: It is TOML, but not a plan.
        """
        # Loaded here, because most programs neither read nor write plan files.
        import tomllib

        return cls.from_dict(tomllib.loads(text))

    def to_json(self) -> str:
        """Return the plan as JSON; ``from_json`` returns an equal plan."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a plan from JSON.

        Raises:
            json.JSONDecodeError: ``text`` is not JSON.
            PlanError: It is JSON, but not a plan.
        """
        # TOML is always a table; JSON may also be a list, a string or a number.
        data: object = json.loads(text)
        if not isinstance(data, dict):
            raise PlanError([Problem(f"a plan is a JSON object, not {type(data).__name__}")])
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write the plan to a ``.toml`` or ``.json`` file; a failure leaves the old file unchanged.

        Raises:
            TypeError: A task's stream is a ``torch.Stream``.
            OSError: The file cannot be written.
        """
        is_json = Path(path).suffix == ".json"
        write_atomically(path, self.to_json() if is_json else self.to_toml())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan from a ``.toml`` or ``.json`` file.

        Raises:
            OSError: The file cannot be read.
            UnicodeDecodeError: It is not UTF-8.
            ValueError: It is too large, or the errors of ``from_toml`` and ``from_json``.
        """
        text = read_text(path)
        return cls.from_json(text) if Path(path).suffix == ".json" else cls.from_toml(text)

    def digest(self) -> str:
        """Return a hash (hex) of ``agreed_fields``, for comparing plans across ranks."""
        data = {key: _plain(value) for key, value in self.agreed_fields().items()}
        # As pairs, since sort_keys would hide the order of the schedule, which counts.
        data["schedule"] = [[name, row] for name, row in data["schedule"].items()]
        return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()

    def agreed_fields(self) -> dict[str, Any]:
        """Return the values of the fields that affect order, on which all ranks must agree."""
        # A new field of the plan is compared unless _MAY_DIFFER says why it need not be.
        names = [name for name in _KEYS if name not in _MAY_DIFFER]
        # The depth itself, not pipeline_depth: None and its default are the same plan.
        return {name: getattr(self, name) for name in names} | {"pipeline_depth": self.depth}


_KEYS = tuple(f.name for f in fields(PipelinePlan) if f.name != "tasks")
# Their values are checked when a pipeline is built.
_SCALARS = ("pipeline_depth", "pull_group", "within_calls", "run_ahead")
_MAY_DIFFER = {
    "streams": "a stream's priority orders nothing",
    "run_ahead": "a rank that waits for its device orders nothing",
    "stale": "it allows reads, and changes no order",
    "newer": "it allows reads, and changes no order",
}
"""Fields that ``digest`` ignores, and why."""


# ------------------------------------------------------------------ what is given, checked


def _schedule(schedule: Mapping[Any, Any], problems: list[Problem]) -> ByTask[TaskSchedule]:
    named: dict[str, TaskSchedule] = {}
    for key, entry in schedule.items():
        name = key.name if isinstance(key, PipelineTask) else key
        if not isinstance(name, str):
            text = f"schedule key {shown(key)} is neither a task nor a task's name"
            problems.append(Problem(text))
            continue
        if not isinstance(entry, TaskSchedule):
            text = f"task {shown(name)}: its schedule is {shown(entry)}; give a TaskSchedule"
            problems.append(Problem(text, (name,)))
        named[name] = entry  # as in any dict, the last entry counts, be the key a task or its name
    return ByTask(named)


def _edges(
    what: str, entries: Iterable[Any], problems: list[Problem]
) -> tuple[tuple[Any, ...], ...]:
    """Return (consumer, producer) pairs, for edges across iterations with a distance."""
    far = what == "cross_iter_deps"
    form = "(consumer, producer)"
    if far:
        count = f"1 to {MOST_ITERATIONS} iterations"
        form = f"(consumer, producer[, distance]) with a distance of {count}"
    good: list[tuple[Any, ...]] = []
    for entry in entries:
        is_list = isinstance(entry, Sequence) and not isinstance(entry, str)
        parts = [p.name if isinstance(p, PipelineTask) else p for p in (entry if is_list else ())]
        if far and len(parts) == 2:
            # The default distance is filled in, so that equal plans compare equal.
            parts.append(1)
        match parts:
            case (str(), str()) if not far:
                good.append(tuple(parts))
            case (str(), str(), int() as distance) if far and 1 <= distance <= MOST_ITERATIONS:
                good.append(tuple(parts))
            case _:
                problems.append(Problem(f"{what} entry {shown(entry)}: write {form}"))
    return tuple(good)


def _order(order: Iterable[Any], problems: list[Problem]) -> tuple[str, ...]:
    names = [ref.name if isinstance(ref, PipelineTask) else ref for ref in order]
    problems += [
        Problem(f"order has {shown(name)}, which is neither a task nor a task's name")
        for name in names
        if not isinstance(name, str)
    ]
    return tuple(names)


def _shifts(what: str, shifts: Mapping[Any, Any], problems: list[Problem]) -> dict[str, int]:
    for state, count in shifts.items():
        # type() and not isinstance(): True is an int, but no number of iterations.
        is_count = type(count) is int and 1 <= count <= MOST_ITERATIONS
        if not (is_count and isinstance(state, str)):
            rule = f"write state = iterations, 1 to {MOST_ITERATIONS}"
            problems.append(Problem(f"{what} entry {shown(state)}: {shown(count)}: {rule}"))
    return dict(shifts)


def _keep(keep: Any, problems: list[Problem]) -> tuple[str, ...]:
    rule = 'write a list of names of attributes, such as ["loss"]'
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        problems.append(Problem(f"keep is {shown(keep)}: {rule}"))
        return ()
    names = tuple(keep)
    wrong = [name for name in names if not (isinstance(name, str) and is_label(name))]
    problems += [Problem(f"keep has {shown(name)}: {rule}") for name in wrong]
    # Without duplicates, in the order given.
    return () if wrong else tuple(dict.fromkeys(names))


def _tasks(given: Iterable[Any], problems: list[Problem]) -> tuple[PipelineTask, ...]:
    named: dict[str, PipelineTask] = {}
    for task in given:
        # The same task may be given twice, in tasks= and as a key of the schedule.
        if isinstance(task, PipelineTask) and named.setdefault(task.name, task) != task:
            text = f"two tasks are named {shown(task.name)}; names are unique"
            problems.append(Problem(text, (task.name,)))
    return tuple(named.values())


def _check_names(values: Mapping[str, Any], problems: list[Problem]) -> None:
    """Report names that a terminal or a file cannot show; validation reports empty names."""
    edges = chain(values["deps"], values["cross_iter_deps"], values["same_period_deps"])
    used = chain(values["schedule"], *(edge[:2] for edge in edges), values["order"])
    problems += [
        Problem(f"task name {shown(name)}: {NAME_RULE}", (name,))
        for name in dict.fromkeys([name for name in used if isinstance(name, str)])
        if not is_name(name)
    ]
    # Entries of a wrong type have been reported already, and have no labels to look at.
    entries = [entry for entry in values["schedule"].values() if isinstance(entry, TaskSchedule)]
    labels: list[tuple[str, Any]] = [
        *[("thread_group", entry.thread_group) for entry in entries],
        ("thread_group", values["pull_group"]),
        *[("stream", entry.stream) for entry in entries],
        *[("stream", name) for name in values["streams"]],
        *[(what, name) for what in ("stale", "newer") for name in values[what]],
    ]
    # Streams that are objects have no name. Each name is reported once.
    labels = [label for label in labels if isinstance(label[1], str)]
    problems += [
        Problem(f"{what} {shown(name)}: {LABEL_RULE}")
        for what, name in dict.fromkeys(labels)
        if name and not is_label(name)
    ]


def _plain(value: Any) -> Any:
    """Return lists, dicts and scalars; of schedule entries only values that are not the default."""
    # For digest(): stream objects differ between ranks, and to_dict() has refused them before.
    if isinstance(value, torch.Stream):
        return "<torch.Stream>"
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    # Defaults are left out, so that a file shows only what its author chose.
    if isinstance(value, TaskSchedule | StreamSpec):
        held, default = (
            {f.name: _plain(getattr(of, f.name)) for f in fields(of)}
            for of in (value, type(value)())
        )
        return {name: entry for name, entry in held.items() if entry != default[name]}
    return value
