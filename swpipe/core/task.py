"""Tasks: a name, a function of the iteration's context, and declared side effects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, Literal, TypeAlias, TypeVar, overload

from swpipe.core.messages import MOST_CHARACTERS, shown

TaskFn: TypeAlias = Callable[[Any], None]
"""A function of the iteration's context, of any type."""

Mode: TypeAlias = Literal["r", "w", "rw"]
Others: TypeAlias = Literal["rw", "r", ""]
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class DeclaredIO:
    """A side effect of a task, outside its context.

    While a shortcut replaces a task, the task does not run; ``capture`` and ``restore`` reproduce
    its side effect. ``restore`` may get the captured value many times: of a value that can be used
    only once, such as the handle of a collective, capture the result instead.

    If two tasks name the same ``state`` and one of them writes it, every plan must run them in
    serial order; ``swpipe.analysis.verification`` checks this.

    Attributes:
        capture: A function that is called right after the task ran; it returns the value to keep.
        restore: A function that is called instead of the task with that value, its tensors
            detached.
        state: The name of an object that outlives an iteration: "model", "cache", "data.log".
        mode: Whether the task reads ("r"), writes ("w") or does both ("rw").
        memory: The tensors and modules that hold the state, alone or in lists and dicts; needed
            only once per state. A recording reports accesses to this memory by the state's name,
            and a trial puts its contents back. Objects with ``state_dict`` and
            ``load_state_dict`` are accepted, too.
        reset: A function that is called when iterations in flight are dropped, by a failure or by
            ``close``; it drops the values that the task keeps for them outside their contexts.
        on_host: Whether Python uses the state on the host alone, as a counter, and no device work
            does. Its order is then kept if the functions are in order (``PipelinePlan.host_only``).
            It counts if all tasks that name the state, or were recorded to touch it, say so.
        others: How undeclared code (the loop's body, a loader, a task) may touch the state: "rw";
            "r" if it only reads; "" if only tasks that name the state touch it. Needed only once
            per state.

    Raises:
        ValueError: The fields are incomplete or contradict each other.
    """

    capture: Callable[[], Any] | None = None
    restore: Callable[[Any], None] | None = None
    state: str | None = None
    mode: Mode = "rw"
    memory: Any = field(default=None, compare=False, repr=False)
    reset: Callable[[], None] | None = None
    on_host: bool = False
    others: Others = "rw"

    def __post_init__(self) -> None:
        # Raised at the first fault: unlike a plan, a DeclaredIO is written in one place.
        if (self.capture is None) != (self.restore is None):
            raise ValueError(
                "a DeclaredIO needs both capture and restore, or neither: restore puts back what "
                "capture returned"
            )
        if self.state is None:
            if self.capture is None and self.reset is None:
                raise ValueError(
                    "a DeclaredIO declares nothing: give a state, capture and restore, or reset"
                )
            if self.memory is not None or self.others != "rw":
                what = "memory" if self.memory is not None else "others"
                raise ValueError(f"{what} is given without a state: name the state it describes")
        elif not (isinstance(self.state, str) and self.state):
            raise ValueError(f"state is {shown(self.state)}; give a name")
        if self.mode not in ("r", "w", "rw"):
            raise ValueError(f"mode is {shown(self.mode)}; give 'r', 'w' or 'rw'")
        if self.others not in ("rw", "r", ""):
            raise ValueError(f"others is {shown(self.others)}; give 'rw', 'r' or ''")
        if self.on_host and (self.state is None or self.memory is not None):
            raise ValueError(
                "on_host=True describes a state that only Python on the host uses: name the state, "
                "and give no memory of tensors, which device work may use"
            )


# Names are shown in messages, tables and traces, and are keys in files: printable and short.
LABEL_RULE = f"names have 1 to {MOST_CHARACTERS} printable characters; choose another"
NAME_RULE = f"{LABEL_RULE}, not beginning with '<', which swpipe keeps for its own steps"


def is_name(name: str) -> bool:
    """Return whether a task may have this name."""
    return 0 < len(name) <= MOST_CHARACTERS and name[0] != "<" and name.isprintable()


def is_label(name: str) -> bool:
    """Return whether a thread group, a stream, a state or a resource may have this name."""
    return 0 < len(name) <= MOST_CHARACTERS and name.isprintable()


@dataclass(frozen=True, slots=True)
class PipelineTask:
    """A named unit of work, to which plans refer by its name.

    ``task(ctx)`` calls ``fn(ctx)`` and nothing else: no pipeline, no seed, no shortcut.

    Attributes:
        name: The name, unique among the tasks of a pipeline; 1 to 200 printable characters, the
            first of which is not "<".
        fn: The function, which reads and writes attributes of the context; its return value is
            ignored.
        io: The side effects outside the context.
        random: Whether the task draws from torch's default generators. Each run is seeded from the
            pipeline's seed, the task's name and the iteration, so every plan draws the same
            numbers. All threads share the generators, so these tasks run one at a time.
        pure: Whether the task uses its context and values that nobody changes while the loop runs,
            and changes its context only (and, if ``random``, draws). It may then run ahead of
            other iterations. A task that is not pure and names no state in ``io`` is *undeclared*:
            it may touch every state that is not declared private. It keeps its serial order
            with all undeclared tasks, with the loop's body, and with tasks that name states
            without restricting ``others``.
        reads: The attributes of the context that the task uses: reads, modifies, replaces or
            deletes; without those that it sets first. A pipeline with ``keep`` deletes a value
            after the last task that uses it. None: any attribute, unless a recording shows which.

    Raises:
        TypeError: ``name`` is not a string, ``fn`` cannot be called or is asynchronous or a
            generator function, ``io`` has an entry that is no ``DeclaredIO``, or ``reads`` is no
            list of names.
        ValueError: ``name`` is empty, longer, not printable, or begins with "<"; or the task is
            pure and ``io`` names a state that it writes.
    """

    name: str
    fn: TaskFn  # compared, so that two different tasks of one name are not equal
    io: Sequence[DeclaredIO] = field(default=(), compare=False)
    random: bool = field(default=False, compare=False)
    pure: bool = field(default=False, compare=False)
    reads: Sequence[str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a task's name is a string, not {shown(self.name)}")
        if not is_name(self.name):
            raise ValueError(f"task name {shown(self.name)}: {NAME_RULE}")
        task = f"task {self.name!r}"
        if not callable(self.fn):
            raise TypeError(f"{task}: fn must be callable with a context, not {shown(self.fn)}")
        # A call of these only makes a coroutine or a generator, and the task would do nothing.
        if any(kind(self.fn) for kind in _NOT_RUN):
            raise TypeError(
                f"{task}: fn is asynchronous or has a yield, so a call would not run it: give a "
                "plain function"
            )
        if isinstance(self.io, DeclaredIO):
            raise TypeError(f"{task}: io is one DeclaredIO: give a list, io=[...]")
        # Lists become tuples, so that nobody can change a task; the dataclass is frozen.
        object.__setattr__(self, "io", tuple(self.io))
        if self.reads is not None:
            is_list = isinstance(self.reads, Iterable) and not isinstance(self.reads, str)
            names = tuple(self.reads) if is_list else ()
            if not is_list or any(not isinstance(name, str) for name in names):
                rule = 'give names of attributes in a list, such as ["batch"]'
                raise TypeError(f"{task}: reads is {shown(self.reads)}: {rule}")
            object.__setattr__(self, "reads", names)
        for declared in self.io:
            if not isinstance(declared, DeclaredIO):
                raise TypeError(f"{task}: io has {shown(declared)}: give DeclaredIOs")
            # A pure task may run ahead of iterations whose tasks use the state.
            if self.pure and declared.state is not None and "w" in declared.mode:
                raise ValueError(
                    f"{task} is pure, and its io names state {declared.state!r} with mode "
                    f"{declared.mode!r}: a pure task changes its context only. Leave "
                    "out pure=True, or the state; a pure task may read states (mode='r')"
                )

    # Without fn, since a callable object need not be hashable.
    def __hash__(self) -> int:
        return hash(self.name)

    def __call__(self, ctx: Any) -> None:
        self.fn(ctx)

    @property
    def undeclared(self) -> bool:
        """Whether nothing is declared about state that the task touches outside its context.

        States that swpipe itself adds have names that begin with "<", and declare nothing.
        """
        # An io without a state, for a shortcut or a reset, declares nothing about state either.
        return not self.pure and not any((io.state or "<")[0] != "<" for io in self.io)


_NOT_RUN = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)
"""Tests for functions whose call only makes an object, and runs nothing."""


@overload
def task(fn: TaskFn, /) -> PipelineTask: ...


@overload
def task(
    *,
    name: str | None = None,
    io: Sequence[DeclaredIO] = (),
    random: bool = False,
    pure: bool = False,
    reads: Sequence[str] | None = None,
) -> Callable[[TaskFn], PipelineTask]: ...


def task(
    fn: TaskFn | None = None,
    /,
    *,
    name: str | None = None,
    io: Sequence[DeclaredIO] = (),
    random: bool = False,
    pure: bool = False,
    reads: Sequence[str] | None = None,
) -> PipelineTask | Callable[[TaskFn], PipelineTask]:
    """Return a ``PipelineTask`` that runs a function: ``@task``, or ``@task(pure=True)``.

    Args:
        fn: The function, which remains ``fn`` of the task.
        name: The task's name; None is the function's name.
        io: Its side effects, as for ``PipelineTask``.
        random: Whether it draws from torch's default generators, as for ``PipelineTask``.
        pure: Whether it changes its context only, as for ``PipelineTask``.
        reads: The attributes that it uses, as for ``PipelineTask``.

    Raises:
        TypeError: ``fn`` cannot be called, or it has no name, like a lambda, and none is given.
        ValueError: ``fn`` is a method, defined with ``self``, or ``name`` cannot be a task's.
    """
    # Called with keywords only: return the decorator, which gets the function next.
    if fn is None:
        decorator: Any = partial(task, name=name, io=io, random=random, pure=pure, reads=reads)
        return decorator  # type: ignore[no-any-return]
    if not callable(fn):
        raise TypeError(
            f"a task is a function of the context, not {shown(fn)}; @task takes its name as name="
        )
    # In a class body a method is a plain function; only its first parameter tells.
    if isinstance(fn, FunctionType) and [*inspect.signature(fn).parameters][:1] == ["self"]:
        raise ValueError(
            f"@task decorates functions of the context, and {fn.__qualname__} is a method: its "
            "first parameter is self. Leave the decorator out, and write "
            f"PipelineTask({fn.__name__!r}, obj.{fn.__name__}), where obj is the object"
        )
    # A partial or another callable object has no name either.
    if name is None:
        name = getattr(fn, "__name__", "")
        if not is_name(name):  # such as <lambda>
            raise TypeError(
                f"{shown(fn)} has no name for a task: PipelineTask(name, fn) gives one, such as "
                "PipelineTask('decode', lambda ctx: ...); so does a def"
            )
    return PipelineTask(name, fn, io, random, pure, reads)


TaskRef: TypeAlias = str | PipelineTask
"""A task, or its name."""


_NOT_A_TASK = "give a PipelineTask; swpipe.task(fn) makes one of a function"


def name_of(ref: TaskRef) -> str:
    """Return the name of a task.

    Raises:
        TypeError: ``ref`` is neither a task nor a name.
    """
    if isinstance(ref, str):
        return ref
    if not isinstance(ref, PipelineTask):
        raise TypeError(f"{shown(ref)} is no task: {_NOT_A_TASK}, or give its name")
    return ref.name


def refs_in(refs: Iterable[V]) -> tuple[V, ...]:
    """Return the tasks, or their names, of a list.

    Raises:
        TypeError: ``refs`` is no list.
    """
    # A string can be iterated over, letter by letter, but is never a list of tasks.
    if isinstance(refs, str) or not isinstance(refs, Iterable):
        raise TypeError(f"tasks is {shown(refs)}: give the tasks, or their names, in a list")
    return tuple(refs)


def names_of(refs: Iterable[TaskRef]) -> tuple[str, ...]:
    """Return the names of several tasks.

    Raises:
        TypeError: ``refs`` is no list, or an entry is neither a task nor a name.
    """
    return tuple([name_of(ref) for ref in refs_in(refs)])


def checked_tasks(tasks: Iterable[PipelineTask]) -> tuple[PipelineTask, ...]:
    """Return the tasks of a list.

    Raises:
        TypeError: ``tasks`` is no list of tasks.
    """
    given = refs_in(tasks)
    for ref in given:
        if not isinstance(ref, PipelineTask):
            raise TypeError(f"tasks has {shown(ref)}: {_NOT_A_TASK}")
    return given


class ByTask(dict[str, V]):
    """A dict of values by the name of a task; a task may stand for its name as a key."""

    def __init__(self, values: Mapping[Any, V] | Iterable[tuple[Any, V]] = ()) -> None:
        # Keys are stored as names: a task and its name are one key.
        named = {
            ref.name if isinstance(ref, PipelineTask) else ref: value
            for ref, value in dict(values).items()
        }
        super().__init__(named)

    def __getitem__(self, ref: TaskRef) -> V:
        return super().__getitem__(ref.name if isinstance(ref, PipelineTask) else ref)

    def __contains__(self, ref: object) -> bool:
        # dict's own methods do not call __getitem__, so each of them is overridden here.
        return super().__contains__(ref.name if isinstance(ref, PipelineTask) else ref)

    def get(self, ref: Any, default: Any = None) -> Any:
        """Return the task's value, or ``default``."""
        return super().get(ref.name if isinstance(ref, PipelineTask) else ref, default)
