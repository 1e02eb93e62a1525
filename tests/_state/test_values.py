"""Classes of the user's come back as they were, wherever a task finds them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from swpipe._state.values import SavedValues
from swpipe.core.task import PipelineTask


class Base:
    """Keeps a number and a list for all objects of its subclasses."""

    steps = 0
    seen: ClassVar[list[int]] = []

    @classmethod
    def count(cls) -> None:
        """As a task may: at a class, not at an object."""
        Base.steps += 1
        Base.seen.append(Base.steps)


class Counter(Base):
    """Found as the class of an object."""

    def __call__(self, ctx: Any) -> None:
        type(self).count()


class Slotted(Base):
    """An object without attributes."""

    __slots__ = ()


class PerObject:
    """A descriptor that keeps the numbers of all objects."""

    def __init__(self) -> None:
        self.numbers: Any = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, cls: Any) -> Any:
        return self.numbers.get(owner, 0)

    def __set__(self, owner: Any, value: Any) -> None:
        self.numbers[owner] = value


class Described:
    """Found as an object with one."""

    steps = PerObject()

    def __call__(self, ctx: Any) -> None:
        self.steps += 1


class Named(Base):
    """Found under a global name."""


def by_object() -> Callable[[Any], object]:
    """A closure leads to an object, and to its class through it alone."""
    counter: Any = Counter()
    return lambda ctx: counter(ctx)


def by_slotted_object() -> Callable[[Any], object]:
    """The same, of an object that has no attributes to put back."""
    counter: Any = Slotted()
    return lambda ctx: counter.count()


def by_closure() -> Callable[[Any], object]:
    """A closure leads to the class itself."""
    held: Any = type("Held", (Base,), {"__module__": __name__})
    return lambda ctx: held.count()


def by_global() -> Callable[[Any], object]:
    """The code names the class."""
    return lambda ctx: Named.count()


def by_list() -> Callable[[Any], object]:
    """A list has the class as an item."""
    held: list[Any] = [type("Item", (Base,), {"__module__": __name__})]
    return lambda ctx: held[0].count()


@pytest.mark.parametrize(
    "make",
    [by_object, by_slotted_object, by_closure, by_global, by_list],
    ids=lambda make: make.__name__,
)
def test_what_a_class_keeps_comes_back(make: Callable[[], Callable[[Any], object]]) -> None:
    """Its own attributes and those of its bases; containers are refilled in place."""
    before, seen = Base.steps, list(Base.seen)
    task = PipelineTask("count", make())
    saved = SavedValues([task])
    task(None)
    assert (Base.steps, Base.seen) == (before + 1, [*seen, before + 1])
    held = Base.seen
    saved.restore()
    assert (Base.steps, Base.seen) == (before, seen)
    assert Base.seen is held


def test_what_a_descriptor_keeps_comes_back() -> None:
    """It belongs to the class; what it has for each object is in a dictionary of its own."""
    described = Described()
    saved = SavedValues([PipelineTask("count", described)])
    described(None)
    saved.restore()
    assert described.steps == 0
