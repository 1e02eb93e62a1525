"""A replay returns an equal copy of any object, or the task is refused by name."""

from __future__ import annotations

import array
import io
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from swpipe.core.context import IterContext
from swpipe.core.task import PipelineTask
from swpipe.errors import ShortcutError
from swpipe.shortcut import Shortcuts


class Thing:
    """An object of a plain class."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    """An object with its value in a slot."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Counter:
    """An iterator of a plain class."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.count += 1
        return self.count


class OwnQueue(queue.SimpleQueue):  # type: ignore[type-arg]
    """A queue whose items are not among its attributes."""


class OwnBytes(bytearray):
    """An array whose bytes are not among its attributes."""


class Stateful(Thing):
    """An object of the model, whose state is saved and restored elsewhere."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class SharedByDesign(Thing):
    """An object that iterations may share."""

    same_in_replay = True


class Uncopyable(Thing):
    """An object with a lock, which cannot be copied."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.lock = threading.Lock()


@dataclass
class Held:
    """A container with a value."""

    value: Any
    more: list[Any] = field(default_factory=list)


class Nothing:
    """An object without attributes, compared by identity."""


NOTHING = Nothing()


class Replayed:
    """A task that produces ``make()`` and is shortcut from the start."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.shortcuts = Shortcuts()
        self.shortcuts.enable(["t"])
        self.task = PipelineTask("t", lambda ctx: setattr(ctx, "y", make()))
        self.iterations = 0

    def __call__(self) -> Any:
        """Return the value of the next iteration."""
        ctx = IterContext(None, self.iterations)
        self.iterations += 1
        self.shortcuts.run(self.task, ctx)
        return ctx.y


def told(value: Any) -> Any:
    """Return a value in a form that can be compared."""
    if isinstance(value, Thing | Slotted):
        names = vars(value) if hasattr(value, "__dict__") else value.__slots__
        return type(value), {name: told(getattr(value, name)) for name in names}
    if isinstance(value, Held):
        return told(value.value), told(value.more)
    if isinstance(value, list | tuple):
        return [told(item) for item in value]
    if isinstance(value, dict):
        return {key: told(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, memoryview | array.array):
        return value.tolist()
    return value


def append(value: Any) -> None:
    value.append(1)


def set_first(value: Any) -> None:
    value[0] = 7


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "array": (lambda: np.zeros(3), set_first),
    "array of dates": (lambda: np.zeros(3, "datetime64[s]"), set_first),
    "array of objects": (lambda: np.array([[1], [2, 3]], dtype=object), lambda y: y[0].append(4)),
    "view of an array": (lambda: np.zeros(6)[::2], set_first),
    "array in a dataclass": (lambda: Held(np.zeros(3)), lambda y: set_first(y.value)),
    "array in a tuple in a dict": (lambda: {"a": (np.zeros(3),)}, lambda y: set_first(y["a"][0])),
    "bytearray": (lambda: bytearray(b"abc"), set_first),
    "own class of bytes": (lambda: OwnBytes(b"abc"), set_first),
    "array.array": (lambda: array.array("i", [1, 2]), set_first),
    "plain object": (lambda: Thing(count=0), lambda y: setattr(y, "count", y.count + 1)),
    "deleted attribute": (lambda: Thing(count=0), lambda y: delattr(y, "count")),
    "object in a slot": (lambda: Slotted([0]), lambda y: append(y.value)),
    "tensor in an object": (lambda: Thing(x=torch.zeros(3)), lambda y: y.x.add_(1)),
    "objects in a list": (lambda: [Thing(n=1), Thing(n=2)], lambda y: setattr(y[1], "n", 9)),
}


@pytest.mark.parametrize(("make", "change"), KINDS.values(), ids=KINDS)
def test_each_replay_gives_an_equal_copy(
    make: Callable[[], Any], change: Callable[[Any], object]
) -> None:
    """Later tasks may change anything: every iteration gets the value of the cached run.

    What an upstream task made and the task itself changes in place is restored as changed.
    """
    replayed = Replayed(make)
    for _ in range(5):
        value = replayed()
        assert told(value) == told(make())
        change(value)
        assert told(value) != told(make())
    shortcuts = Shortcuts()
    shortcuts.enable(["t"])
    task = PipelineTask("t", lambda ctx: change(ctx.y))
    for _ in range(3):
        ctx = SimpleNamespace(y=make())
        shortcuts.run(task, ctx)
        assert told(ctx.y) == told(value)


def test_parts_that_were_shared_are_shared_again() -> None:
    """They may be objects, or an object and a tensor or array.

    An object without attributes stays itself: code compares it by identity.
    """
    rows, x, inner = np.zeros(3), torch.zeros(3), Thing(n=1)
    made = [Thing(rows=rows, x=x, a=inner), Thing(a=inner, b=NOTHING), rows, x]
    replayed = Replayed(lambda: made)
    for _ in range(3):
        first, second, array_, tensor = replayed()
        assert second.b is NOTHING
        assert first.a is second.a
        assert first.rows is array_
        assert first.x is tensor
        assert first.a is not inner or replayed.iterations == 1


def generator() -> Iterator[int]:
    yield from range(3)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "generator": (generator, "'generator', an iterator, which the first iteration uses up"),
    "own iterator": (Counter, "'Counter', an iterator"),
    "generator in a list": (lambda: [1, {"a": generator()}], "an iterator"),
    "generator in an object": (lambda: Thing(g=generator()), "'Thing' with one of class 'gene"),
    "file": (lambda: io.StringIO("text"), "an iterator"),
    "future": (Future, "cannot be copied, and whose changes cannot be detected"),
    "queue": (queue.SimpleQueue, "cannot be copied"),
    "queue of an own class": (OwnQueue, "cannot be copied"),
    "graph in an object": (
        lambda: Thing(loss=torch.ones(1, requires_grad=True) * 2),
        "a tensor that autograd computed",
    ),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_replayed_is_refused_at_once(make: Callable[[], Any], reason: str) -> None:
    """It is refused before any replay, with the attribute and what to do."""
    with pytest.raises(ShortcutError) as caught:
        Replayed(make)()
    text = str(caught.value)
    assert "task 't' cannot be replayed: ctx.y holds an object of class" in text
    assert reason in text
    assert "same_in_replay = True" in text


CHANGED_LATER: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "with a lock": (lambda: Uncopyable(n=[]), lambda y: append(y.n)),
    "with a model": (lambda: Thing(m=MODEL, n=1), lambda y: setattr(y, "n", 2)),
    "with a state": (lambda: Thing(m=STATEFUL, n=1), lambda y: setattr(y, "n", 2)),
    "with a parameter": (lambda: Thing(p=MODEL.weight, n=1), lambda y: setattr(y, "n", 2)),
    "with an array and a model": (lambda: [Thing(m=MODEL, a=ROWS)], lambda y: set_first(y[0].a)),
}
MODEL, ROWS, STATEFUL = nn.Linear(1, 1), np.zeros(3), Stateful(n=1)


@pytest.mark.parametrize(("make", "change"), CHANGED_LATER.values(), ids=CHANGED_LATER)
def test_what_cannot_be_copied_is_shared_until_it_changes(
    make: Callable[[], Any], change: Callable[[Any], object]
) -> None:
    """The same object is restored; after a later task has changed it, a replay is an error."""
    replayed = Replayed(make)
    first = replayed()
    value = replayed()
    assert (value[0] if isinstance(value, list) else value) is (
        first[0] if isinstance(first, list) else first
    )
    replayed.shortcuts.check(["t"])
    change(value)
    with pytest.raises(ShortcutError, match=r"ctx\.y holds .* was modified after the task"):
        replayed()
    with pytest.raises(ShortcutError, match="was modified after the task"):
        replayed.shortcuts.check(["t"])


@pytest.mark.parametrize(
    "value",
    [
        NOTHING,
        MODEL,
        MODEL.weight,
        torch.optim.SGD(MODEL.parameters(), 0.1),
        torch.Generator(),
        np.random.default_rng(0),
        SharedByDesign(n=1),
        SharedByDesign(g=generator()),
        Nothing,
        len,
        told,
        np.float32(1),
        np.dtype("f4"),
        threading.Lock(),
        "text",
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_iterations_may_share_comes_back_itself(value: Any) -> None:
    """These are immutable values, what belongs to the model, and what is declared shared."""
    replayed = Replayed(lambda: [value])
    for _ in range(3):
        assert replayed()[0] is value


@pytest.mark.parametrize("make", [Stateful, SharedByDesign])
def test_what_iterations_share_may_change(make: type[Thing]) -> None:
    """It is not compared: it changes in every iteration."""
    shared = make(n=0)
    replayed = Replayed(lambda: shared)
    for _ in range(4):
        replayed().n += 1
    assert shared.n == 4
