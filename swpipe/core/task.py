"""What to compute: a name, a function of the iteration's context, and declared side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from swpipe.core.context import IterContext

TaskFn: TypeAlias = Callable[[IterContext], None]
Mode: TypeAlias = Literal["r", "w", "rw"]


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
            only once per state. A recording reports accesses to this memory by the state's name.

    Raises:
        ValueError: The fields are incomplete or contradict each other.
    """

    capture: Callable[[], Any] | None = None
    restore: Callable[[Any], None] | None = None
    state: str | None = None
    mode: Mode = "rw"
    memory: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.capture is None) != (self.restore is None):
            raise ValueError(
                "a DeclaredIO needs both capture and restore, or neither: what one keeps, "
                "the other puts back"
            )
        if self.capture is None and self.state is None:
            raise ValueError("a DeclaredIO declares nothing: give a state, or capture and restore")
        if self.state is not None and not (isinstance(self.state, str) and self.state):
            raise ValueError(f"state is {self.state!r}; give a name")
        if self.mode not in ("r", "w", "rw"):
            raise ValueError(f"mode is {self.mode!r}; give 'r', 'w' or 'rw'")
        if self.memory is not None and self.state is None:
            raise ValueError("memory is given, and no state that lies in it: name the state")


@dataclass(frozen=True, slots=True)
class PipelineTask:
    """One named unit of work. Plans refer to it by name.

    Attributes:
        name: Unique among the tasks of a pipeline; not empty, and does not begin with "<".
        fn: Reads and writes attributes of the context; its return value is ignored.
        io: Side effects outside the context.
        random: The task draws from torch's default generators. Each run is seeded from the
            pipeline's seed, the task's name and the iteration, so every plan draws the same
            numbers. All threads share the generators, so such tasks run one at a time.

    Raises:
        TypeError: ``name`` is not a string, or ``fn`` cannot be called.
        ValueError: ``name`` is empty or begins with "<".
    """

    name: str
    fn: TaskFn = field(hash=False)  # compared, so that two tasks of one name are seen to be two
    io: Sequence[DeclaredIO] = field(default=(), compare=False)
    random: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a task's name is a string, not {self.name!r}")
        if not self.name or self.name.startswith("<"):
            raise ValueError(
                f"task name {self.name!r}: names are not empty and do not begin with '<', "
                "which swpipe keeps for its own steps; choose another"
            )
        if not callable(self.fn):
            raise TypeError(
                f"task {self.name!r}: fn must be callable with a context, not {self.fn!r}"
            )
        object.__setattr__(self, "io", tuple(self.io))


TaskRef: TypeAlias = str | PipelineTask
"""A task or its name."""


def name_of(ref: TaskRef) -> str:
    """The name of a task."""
    return ref if isinstance(ref, str) else ref.name


def names_of(refs: Iterable[TaskRef]) -> tuple[str, ...]:
    """The names of several tasks."""
    return tuple(name_of(ref) for ref in refs)
