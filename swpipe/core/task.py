"""What to compute: a name, a function of the iteration's context, and declared side effects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, Literal, TypeAlias, TypeVar, overload

from swpipe.core.keywords import suggests_keywords
from swpipe.core.messages import MOST_CHARACTERS, shown

TaskFn: TypeAlias = Callable[[Any], None]
"""A function of the iteration's context, of whatever type."""

Mode: TypeAlias = Literal["r", "w", "rw"]
Others: TypeAlias = Literal["rw", "r", ""]
V = TypeVar("V")


@suggests_keywords
@dataclass(frozen=True, slots=True)
class DeclaredIO:
    """A side effect of a task, outside its context.

    While a task is shortcut it does not run; ``capture`` and ``restore`` reproduce its side effect.
    ``restore`` may get the captured value many times: of a one-shot value, such as the handle of a
    collective, capture the result instead.

    If two tasks name the same ``state`` and one of them writes it, every plan must run them in
    serial order; ``swpipe.analysis.verification`` checks this.

    Attributes:
        capture: Called right after the task ran; returns the value to keep.
        restore: Called instead of the task with that value, its tensors detached.
        state: Name of something that outlives an iteration: "model", "cache", "data.log".
        mode: Whether the task reads ("r"), writes ("w") or does both ("rw").
        memory: The tensors and modules that hold the state, alone or in lists and dicts; needed
            only once per state. A recording reports accesses to this memory by the state's name,
            and a trial puts it back; also objects with ``state_dict`` and ``load_state_dict``.
        reset: Called when iterations in flight are dropped, by a failure or by ``close``: lets go
            of what the task keeps for them outside their contexts.
        on_host: Python uses the state on the host alone, as a counter, and no device work does. Its
            order is then kept if the functions are in order (``PipelinePlan.host_only``).
        others: How the state may be touched by whoever says nothing (the loop's body, a loader, a
            task): "rw", "r" if they only read it, "" if only tasks that name the state touch it.
            Needed only once per state.

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
        if (self.capture is None) != (self.restore is None):
            raise ValueError(
                "a DeclaredIO needs both capture and restore, or neither: what one keeps, "
                "the other puts back"
            )
        if self.state is None:
            if self.capture is None and self.reset is None:
                raise ValueError(
                    "a DeclaredIO declares nothing: give a state, capture and restore, or reset"
                )
            if self.memory is not None or self.others != "rw":
                what = "memory" if self.memory is not None else "others"
                raise ValueError(
                    f"{what} is given, and no state that it is said of: name the state"
                )
        elif not (isinstance(self.state, str) and self.state):
            raise ValueError(f"state is {shown(self.state)}; give a name")
        if self.mode not in ("r", "w", "rw"):
            raise ValueError(f"mode is {shown(self.mode)}; give 'r', 'w' or 'rw'")
        if self.others not in ("rw", "r", ""):
            raise ValueError(f"others is {shown(self.others)}; give 'rw', 'r' or ''")
        if self.on_host and (self.state is None or self.memory is not None):
            raise ValueError(
                "on_host is said of a state that Python uses on the host alone: name the state, "
                "and give no memory of tensors, which device work uses"
            )


LABEL_RULE = f"names have 1 to {MOST_CHARACTERS} printable characters; choose another"
NAME_RULE = f"{LABEL_RULE}, not beginning with '<', which swpipe keeps for its own steps"


def is_name(name: str) -> bool:
    """Whether a task may have this name."""
    return 0 < len(name) <= MOST_CHARACTERS and name[0] != "<" and name.isprintable()


def is_label(name: str) -> bool:
    """Whether a thread group, a stream, a state or a resource may have this name."""
    return 0 < len(name) <= MOST_CHARACTERS and name.isprintable()


@suggests_keywords
@dataclass(frozen=True, slots=True)
class PipelineTask:
    """One named unit of work. Plans refer to it by name.

    ``task(ctx)`` calls ``fn(ctx)`` and nothing else: no pipeline, no seed, no shortcut.

    Attributes:
        name: Unique among the tasks of a pipeline; 1 to 200 printable characters, the first of
            which is not "<".
        fn: Reads and writes attributes of the context; its return value is ignored.
        io: Side effects outside the context.
        random: The task draws from torch's default generators. Each run is seeded from the
            pipeline's seed, the task's name and the iteration, so every plan draws the same
            numbers. All threads share the generators, so such tasks run one at a time.
        pure: The task uses its context and what nobody changes while the loop runs, and changes its
            context only (and, if ``random``, draws). It may then run ahead of other iterations. A
            task that is not pure and names no state in ``io`` is *undeclared*: it may touch
            everything that is not said to be apart from it, and keeps its serial order with all
            undeclared tasks, with the loop's body, and with tasks that name states of which they do
            not say that ``others`` leave them alone.
        reads: The attributes of the context that the task uses: reads, modifies, replaces or
            deletes; not those that it sets first. A pipeline with ``keep`` lets a value go after
            the last task that uses it. None: any, as far as no recording says otherwise.

    Raises:
        TypeError: ``name`` is not a string, ``fn`` cannot be called or is asynchronous or a
            generator function, ``io`` has something else than ``DeclaredIO``, or ``reads`` is no
            list of names.
        ValueError: ``name`` is empty, longer, not printable, or begins with "<"; or the task is
            pure and ``io`` names a state that it writes.
    """

    name: str
    fn: TaskFn  # compared, so that two tasks of one name are seen to be two
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
        if any(kind(self.fn) for kind in _NOT_RUN):
            raise TypeError(
                f"{task}: fn is asynchronous or has a yield, so a call would not run it: give a "
                "plain function"
            )
        if isinstance(self.io, DeclaredIO):
            raise TypeError(f"{task}: io is one DeclaredIO: give a list, io=[...]")
        object.__setattr__(self, "io", tuple(self.io))
        if self.reads is not None:
            is_list = isinstance(self.reads, Iterable) and not isinstance(self.reads, str)
            names = tuple(self.reads) if is_list else ()
            if not is_list or any(not isinstance(name, str) for name in names):
                rule = 'give names of attributes in a list, such as ["batch"]'
                raise TypeError(f"{task}: reads is {shown(self.reads)}: {rule}")
            object.__setattr__(self, "reads", names)
        for one in self.io:
            if not isinstance(one, DeclaredIO):
                raise TypeError(f"{task}: io has {shown(one)}: give DeclaredIOs")
            if self.pure and one.state is not None and "w" in one.mode:
                raise ValueError(
                    f"{task} is pure, and its io names state {one.state!r} with mode {one.mode!r}: "
                    "a pure task changes its context only. Leave out pure=True, or the state; a "
                    "pure task may read states (mode='r')"
                )

    def __hash__(self) -> int:
        return hash(self.name)

    def __call__(self, ctx: Any) -> None:
        self.fn(ctx)

    @property
    def undeclared(self) -> bool:
        """Whether nothing is said of what the task uses and changes outside its context.

        States that swpipe itself adds, whose names begin with "<", say nothing for the author.
        """
        return not self.pure and not any((io.state or "<")[0] != "<" for io in self.io)


_NOT_RUN = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)
"""Kinds of functions of which a call only makes an object."""


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


@suggests_keywords
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
    """Make a function a ``PipelineTask``: ``@task``, or ``@task(pure=True)``.

    Args:
        fn: The function, which remains ``fn`` of the task.
        name: The task's name; None is the function's name.
        io: As for ``PipelineTask``, and so are the others.
        random: As there.
        pure: As there.
        reads: As there.

    Raises:
        TypeError: ``fn`` cannot be called, or it has no name, as a lambda, and none is given.
        ValueError: ``fn`` is a method, defined with ``self``, or ``name`` cannot be a task's.
    """
    if fn is None:
        decorator: Any = partial(task, name=name, io=io, random=random, pure=pure, reads=reads)
        return decorator  # type: ignore[no-any-return]
    if not callable(fn):
        raise TypeError(
            f"a task is a function of the context, not {shown(fn)}; @task takes its name as name="
        )
    if isinstance(fn, FunctionType) and [*inspect.signature(fn).parameters][:1] == ["self"]:
        raise ValueError(
            f"@task decorates functions of the context, and {fn.__qualname__} is a method: its "
            "first parameter is self. Leave the decorator out, and write "
            f"PipelineTask({fn.__name__!r}, obj.{fn.__name__}), where obj is the object"
        )
    if name is None:
        name = getattr(fn, "__name__", "")
        if not is_name(name):  # such as <lambda>
            raise TypeError(
                f"{shown(fn)} has no name for a task: PipelineTask(name, fn) gives one, such as "
                "PipelineTask('decode', lambda ctx: ...); so does a def"
            )
    return PipelineTask(name, fn, io, random, pure, reads)


TaskRef: TypeAlias = str | PipelineTask
"""A task or its name."""


_NOT_A_TASK = "give a PipelineTask; swpipe.task(fn) makes one of a function"


def name_of(ref: TaskRef) -> str:
    """The name of a task.

    Raises:
        TypeError: It is neither a task nor a name.
    """
    if isinstance(ref, str):
        return ref
    if not isinstance(ref, PipelineTask):
        raise TypeError(f"{shown(ref)} is no task: {_NOT_A_TASK}, or give its name")
    return ref.name


def refs_in(refs: Iterable[V]) -> tuple[V, ...]:
    """The tasks, or their names, of a list.

    Raises:
        TypeError: It is no list.
    """
    if isinstance(refs, str) or not isinstance(refs, Iterable):
        raise TypeError(f"tasks is {shown(refs)}: give the tasks, or their names, in a list")
    return tuple(refs)


def names_of(refs: Iterable[TaskRef]) -> tuple[str, ...]:
    """The names of several tasks.

    Raises:
        TypeError: They are not in a list, or one is neither a task nor a name.
    """
    return tuple([name_of(ref) for ref in refs_in(refs)])


def checked_tasks(tasks: Iterable[PipelineTask]) -> tuple[PipelineTask, ...]:
    """The tasks of a list.

    Raises:
        TypeError: It is no list of tasks.
    """
    found = refs_in(tasks)
    for one in found:
        if not isinstance(one, PipelineTask):
            raise TypeError(f"tasks has {shown(one)}: {_NOT_A_TASK}")
    return found


class ByTask(dict[str, V]):
    """Values by the name of a task; a task stands for its name as a key."""

    def __init__(self, values: Mapping[Any, V] | Iterable[tuple[Any, V]] = ()) -> None:
        named = {
            ref.name if isinstance(ref, PipelineTask) else ref: value
            for ref, value in dict(values).items()
        }
        super().__init__(named)

    def __getitem__(self, ref: TaskRef) -> V:
        return super().__getitem__(ref.name if isinstance(ref, PipelineTask) else ref)

    def __contains__(self, ref: object) -> bool:
        return super().__contains__(ref.name if isinstance(ref, PipelineTask) else ref)

    def get(self, ref: Any, default: Any = None) -> Any:
        """The task's value, or ``default``."""
        return super().get(ref.name if isinstance(ref, PipelineTask) else ref, default)
