"""What to compute: a name, a function of the iteration's context, its declared outside effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from swpipe.core.context import IterContext

TaskFn: TypeAlias = Callable[[IterContext], None]
Mode: TypeAlias = Literal["r", "w", "rw"]


@dataclass(frozen=True, slots=True)
class DeclaredIO:
    """An effect of a task outside its context: how to put it back, and what it is to be called.

    A shortcut task does not run; ``capture`` and ``restore`` let swpipe put such an effect back all
    the same. A one-shot value (the handle of a collective, say) must come out of ``capture`` in a
    form that can be handed out again and again: wait for it once, and hand out the result.

    ``state`` names what is touched. Two tasks that name one state, one of them writing it, must run
    in their serial order under every plan; ``swpipe.analysis.verification`` sees to that.

    Attributes:
        capture: Called right after the task ran; returns the state to keep.
        restore: Called instead of the task, with what ``capture`` returned (tensors come back
            detached).
        state: Name of something that outlives an iteration: "model", "cache", "data.log".
        mode: The task reads ("r"), writes ("w"), or both reads and writes it ("rw").
        memory: What the state lies in, where that is known: tensors, or modules with theirs, alone
            or in lists and dicts. It need be said once. What a recording sees of that memory goes
            by the state's name then.

    Raises:
        ValueError: Neither a state nor capture and restore, one of the two without the other, an
            empty name, another mode, or memory of no state.
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
    """One named unit of work. Its name stands for it in plans.

    Attributes:
        name: Unique among the tasks of a pipeline; not empty, and not in angle brackets.
        fn: Reads and writes attributes of the context; its return value is ignored.
        io: Effects outside the context.
        random: The task draws from torch's default generators. Each of its runs is then seeded from
            the pipeline's seed, its name and the iteration, so that every plan draws the same
            numbers; such tasks run one at a time, since the generators are shared by all threads.

    Raises:
        TypeError: ``name`` is not a string or ``fn`` cannot be called.
        ValueError: ``name`` is empty or in angle brackets.
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
"""A task, or its name: whatever names a task takes either."""


def name_of(ref: TaskRef) -> str:
    """The name of a task given as itself or by name."""
    return ref if isinstance(ref, str) else ref.name


def names_of(refs: Iterable[TaskRef]) -> tuple[str, ...]:
    """The names of several tasks, each given as itself or by name."""
    return tuple(name_of(ref) for ref in refs)
