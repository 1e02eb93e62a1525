"""What a task's code can reach outside the context, and may change there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import getattr_static
from types import CellType, FunctionType
from typing import Any, NamedTuple

from swpipe._state.code_names import LENGTH, SELF, CodeNames, modifies_argument
from swpipe._state.discovery import MAX_ITEMS, attributes_of, content_of, dict_of
from swpipe._state.draws import is_drawing
from swpipe._state.generators import TORCH
from swpipe._state.kinds import CONTAINERS, content_value, identity, is_array
from swpipe._state.owners import is_users_descriptor


class PlaceId(NamedTuple):
    """Where a Python value is: the id of a cell, namespace, object or container, and a name.

    The name is empty for what a container or an opaque object has.
    """

    holder: int
    name: str


@dataclass
class Reach(CodeNames):
    """What one task's code can reach, and what it names.

    Attributes:
        wholes: Modules, optimizers, tensors and generators by id, with the names they are called.
        places: Places of Python values, with their paths.
        inner: Places in a library's objects.
        called: Id of a container, an array or an opaque object to the names that it is called.
        opaque: Ids of what may change whenever it is used.
        owned: What does not belong to an installed library's object, by id, with its path.
        holders: Everything found, by id, so that ids stay valid.
        hooks: Functions that autograd calls during backward.
        draws: Default generators from which the code may draw.
        begins: Whether the code may begin a pass over a loader or sampler that draws a seed for it.
        context: What the code calls the context.
    """

    wholes: dict[int, set[str]] = field(default_factory=dict)
    places: dict[PlaceId, str] = field(default_factory=dict)
    inner: set[PlaceId] = field(default_factory=set)
    called: dict[int, set[str]] = field(default_factory=dict)
    opaque: set[int] = field(default_factory=set)
    owned: dict[int, str] = field(default_factory=dict)
    holders: dict[int, Any] = field(default_factory=dict)
    hooks: dict[int, Any] = field(default_factory=dict)
    draws: set[str] = field(default_factory=set)
    begins: bool = False
    context: str = ""

    def taken(self, called: str) -> set[str | None]:
        """The attributes that the code may take of what is called so."""
        # What it takes nothing but attributes of gets no other name.
        named = self.uses.get(called, {None})
        return named if called and None not in named else named | self.uses[""]

    def taken_by(
        self, own: Sequence[FunctionType], cls: type, taken: set[str | None]
    ) -> set[str | None]:
        """What functions of a class take of its object, which they call ``self``, or otherwise."""
        members = (getattr_static(cls, name, None) for name in taken if name)
        otherwise = any(one.__code__.co_varnames[:1] != (SELF,) for one in own)
        otherwise = otherwise or any(map(is_users_descriptor, members))
        return self.taken(SELF) | (self.uses[""] if otherwise else set())

    def only_reads(self, value: Any, called: str) -> bool:
        """Whether the code takes nothing but a length, and attributes that are no methods."""
        named = self.uses.get(called, {None})
        names = (name for name in named if name and name != LENGTH)
        static = (getattr_static(value, name, None) for name in names)
        return bool(called) and None not in named and not any(map(callable, static))

    def add_library_function(self, function: Any, called: str, owned: bool) -> None:
        """What it does is known by its own name, whatever the code calls it."""
        if owned and called != function.__name__ and is_drawing(function):
            self.draws.add(TORCH)
        of_container = getattr(function, "__objclass__", None) in CONTAINERS  # ``list.append``
        if modifies_argument(function.__name__, of_container):
            self.modifies.add("")

    def content(self, place: PlaceId) -> Any:
        """What the place holds now, or the container that it is; None if it holds nothing."""
        holder = self.holders[place.holder]
        if not place.name:
            return holder
        if isinstance(holder, dict):
            return holder.get(place.name)
        if isinstance(holder, CellType):
            return content_of(holder)
        held = dict_of(holder) or {}
        return held[place.name] if place.name in held else attributes_of(holder).get(place.name)

    def value(self, place: PlaceId) -> object:
        """What the place has now, so that two equal results mean that nothing changed."""
        content = self.content(place)
        if place.name:
            return identity(content)
        if not isinstance(content, CONTAINERS):
            return content_value(content)
        if len(content) > MAX_ITEMS:
            return len(content)
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return [(key, identity(item)) for key, item in items]

    def may_change(self, place: PlaceId) -> bool:
        """Whether the code may assign to the place, or modify the container that it is."""
        if place.name:
            variables = isinstance(self.holders[place.holder], CellType | dict)
            return place.name in self.stores or (
                self.stores_any and (not variables or "globals" in self.names)
            )
        names = self.called.get(place.holder, {""})
        if place.holder in self.opaque:
            return any(self._calls(self.holders[place.holder], name) for name in names)
        changed = self.modifies | self.adds
        if is_array(holder := self.holders[place.holder]):
            changed |= self.fills
        if isinstance(holder, defaultdict) and holder.default_factory:
            changed |= self.subscripts  # of a key that is missing
        return "" in changed or not changed.isdisjoint(names)

    def _calls(self, value: Any, called: str) -> bool:
        """Whether the code does more with an opaque object than to read attributes of it."""
        taken = self.uses.get(called, {None})
        data = [n for n in taken if n and not callable(getattr_static(value, n, None))]
        return called == "" or len(data) < len(taken) or not self.stores.isdisjoint(data)
