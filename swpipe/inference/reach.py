"""What a task's code can reach outside the context, whether or not it did so while recorded.

The search follows what ``swpipe._state.discovery`` follows, but one task at a time, and of an
object only the attributes and methods that the code names: ``self.config.model`` leads to an
attribute ``model`` of what is called ``config``, and not to ``self.model``. What has no such name
(a local variable, an argument, an item) may be any object. No code of the objects is run. Names
that are computed (``setattr(self, prefix + "rate", 1)``) are not found.
"""

from __future__ import annotations

import dis
import gc
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import CellType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swpipe._state.discovery import (
    MAX_ITEMS,
    PLAIN,
    WHOLE,
    content_of,
    is_foreign,
    is_generator,
    is_installed,
)
from swpipe.core.task import PipelineTask

MAX_HOPS = 4
"""How many times in a row the search may follow an attribute."""

CONTAINERS = (list, dict, set, deque)
_STORES = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF")
_MODIFIERS = {
    "append", "appendleft", "extend", "insert", "remove", "pop", "popleft", "popitem",
    "clear", "sort", "reverse", "add", "discard", "update", "setdefault",
}  # fmt: skip
SELF = "self"
LENGTH = "__len__"
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_LOADS = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "LOAD_CLASSDEREF")
_IGNORED = ("CACHE", "PUSH_NULL", "PRECALL", "RESUME", "EXTENDED_ARG", "NOP")
_SUBSCRIPT = ("STORE_SUBSCR", "DELETE_SUBSCR")
_IMPLICIT = {
    "__call__", "__enter__", "__exit__", "__iter__", "__next__", "__len__", "__bool__",
    "__contains__", "__getitem__", "__getitems__", "__setitem__", "__delitem__",
    "__getattr__", "__iadd__",
}  # fmt: skip
_BY_STRING = {
    "getattr", "setattr", "delattr", "hasattr", "vars", "__dict__", "attrgetter",
}  # fmt: skip
_USES = ("LOAD_FAST", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_AND_CLEAR", "STORE_FAST_LOAD_FAST")
_UNNAMED = {"super", "locals", "eval", "exec"}
"""Names of what takes local variables without naming them."""

_NO_CODE = (lambda: None).__code__


class PlaceId(NamedTuple):
    """Where a Python value is: the id of a cell, namespace, object or container, and a name.

    The name is empty for what a container has.
    """

    holder: int
    name: str


@dataclass
class Reach:
    """What one task's code can reach.

    Attributes:
        uses: Name to the attributes that the code takes of what is called so; None among them if
            it does anything else with it. What has no name is called "".
        stores: Names that the code assigns to.
        assigns: The same, without attributes that are assigned to the context alone.
        modifies: Whether the code modifies some list, dict or set.
        wholes: Modules, optimizers, tensors and generators by id, with the names they are called.
        places: Places of Python values, with their paths.
        holders: Everything found, by id, so that ids stay valid.
        context: What the code calls the context.
    """

    uses: dict[str, set[str | None]] = field(default_factory=lambda: {"": set()})
    stores: set[str] = field(default_factory=set)
    assigns: set[str] = field(default_factory=set)
    modifies: bool = False
    wholes: dict[int, set[str]] = field(default_factory=dict)
    places: dict[PlaceId, str] = field(default_factory=dict)
    holders: dict[int, Any] = field(default_factory=dict)
    context: str = ""

    def taken(self, called: str) -> set[str | None]:
        """The attributes that the code may take of what is called so."""
        return self.uses.get(called, set()) | self.uses[""]

    def content(self, place: PlaceId) -> Any:
        """What the place holds now, or the container that it is; None if it holds nothing."""
        holder = self.holders[place.holder]
        if not place.name:
            return holder
        if isinstance(holder, dict):
            return holder.get(place.name)
        if isinstance(holder, CellType):
            return content_of(holder)
        return getattr(holder, "__dict__", {}).get(place.name)

    def value(self, place: PlaceId) -> object:
        """What the place has now, so that two equal results mean that nothing changed."""
        content = self.content(place)
        if place.name:
            return _identity(content)
        if len(content) > MAX_ITEMS:
            return len(content)
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return [(key, _identity(item)) for key, item in items]


def reach_of(task: PipelineTask) -> Reach:
    """Everything that the task's function can reach now."""
    reach = Reach()
    while True:  # names of methods found lead to further attributes
        known = sum(map(len, reach.uses.values()))
        reach.wholes, reach.places = {}, {}
        _Search(reach).run(task.fn)
        if sum(map(len, reach.uses.values())) == known:
            return reach


class _Step(NamedTuple):
    path: str
    called: str
    value: Any
    hops: int


class _Search:
    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._ahead: deque[_Step] = deque()
        self._seen: set[tuple[int, str]] = set()

    def run(self, fn: Any) -> None:
        """Search all that ``fn`` leads to."""
        code = getattr(fn, "__code__", None) or getattr(
            getattr(fn, "__func__", None), "__code__", 0
        )
        if code:
            names = code.co_varnames[isinstance(fn, MethodType) : code.co_argcount]
            self._reach.context = names[0] if names else ""
        self._ahead.append(_Step("", "", fn, 0))
        while self._ahead:
            step = self._ahead.popleft()
            key = (id(step.value), step.called)
            if not isinstance(step.value, PLAIN) and key not in self._seen:
                self._seen.add(key)
                self._reach.holders[id(step.value)] = step.value
                if not (self._only_measured(step) and isinstance(step.value, (Tensor, tuple))):
                    self._enter(step)

    def _only_measured(self, step: _Step) -> bool:
        """Whether the code takes nothing but the length of what is called so."""
        return self._reach.uses.get(step.called) == {LENGTH}

    def _enter(self, step: _Step) -> None:
        value = step.value
        if isinstance(value, (*WHOLE, random.Random)) or is_generator(value):
            self._reach.wholes.setdefault(id(value), set()).add(step.called)
            if isinstance(value, torch.nn.Module):
                self._enter_object(step)
        elif isinstance(value, MethodType):
            self._enter_method(step)
        elif isinstance(value, FunctionType):
            self._enter_function(step)
        elif isinstance(value, partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self._ahead.append(step._replace(value=item, called=""))
        elif isinstance(value, GeneratorType):
            self._enter_generator(step)
        elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
            self._enter_container(step)
        elif type(value).__module__ in ("builtins", "itertools") and hasattr(value, "__next__"):
            self._ahead.append(step._replace(value=_parts_of(value), called=""))
        elif isinstance(value, type):
            self._enter_class(value, value, self._reach.taken(step.called), step.path)
        elif not isinstance(value, ModuleType):
            self._enter_object(step)

    def _place(self, holder: Any, name: str, path: str) -> None:
        self._reach.holders[id(holder)] = holder
        self._reach.places.setdefault(PlaceId(id(holder), name), path)

    def _enter_container(self, step: _Step) -> None:
        value = step.value
        taken = self._reach.taken(step.called)
        if hasattr(value, "_fields") and None not in taken:  # a named tuple
            for name, item in zip(value._fields, value, strict=True):
                if name in taken:
                    self._ahead.append(_Step(f"{step.path}.{name}", name, item, step.hops))
            return
        if isinstance(value, CONTAINERS):
            self._place(value, "", step.path)
        if len(value) <= MAX_ITEMS and not self._only_measured(step):
            for item in list(value.values() if isinstance(value, dict) else value):
                self._ahead.append(step._replace(value=item, called=""))

    def _enter_method(self, step: _Step) -> None:
        method: MethodType = step.value
        self._ahead.append(step._replace(value=method.__func__))
        code = getattr(method.__func__, "__code__", _NO_CODE)
        if _takes_first(code):
            called = SELF if code.co_varnames[:1] == (SELF,) else ""
            self._ahead.append(step._replace(value=method.__self__, called=called))

    def _enter_function(self, step: _Step) -> None:
        function: FunctionType = step.value
        if _of_library(function):
            return
        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in free:
            self._place(cell, name, name)
            self._ahead.append(_Step(name, name, content_of(cell), step.hops))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._ahead.append(step._replace(value=value, called=""))
        self._enter_code(function.__code__, function.__globals__, step)

    def _enter_generator(self, step: _Step) -> None:
        generator: GeneratorType[Any, Any, Any] = step.value
        if generator.gi_frame is not None:
            for name, value in generator.gi_frame.f_locals.items():
                self._ahead.append(_Step(name, name, value, step.hops))
            self._enter_code(generator.gi_code, generator.gi_frame.f_globals, step)
            for one in gc.get_referents(generator):  # its function has the cells of its closure
                if isinstance(one, FunctionType) and one.__code__ is generator.gi_code:
                    self._enter_function(step._replace(value=one))

    def _enter_code(self, code: CodeType, namespace: dict[str, Any], step: _Step) -> None:
        names: set[str] = set()
        loaded: set[str] = set()
        for each in _codes(code):
            names |= set(each.co_names)
            loaded |= self._read_code(each)
        for name in sorted(loaded & namespace.keys()):
            value = namespace[name]
            if not isinstance(value, ModuleType):
                self._global(namespace, name, step)
            elif not is_foreign(value.__name__):
                for inner in sorted(names & vars(value).keys()):
                    self._global(vars(value), inner, step)

    def _read_code(self, code: CodeType) -> set[str]:
        """Add what the code takes of which name, and what it assigns to; returns its globals."""
        loaded: set[str] = set()
        reach = self._reach
        reach.modifies |= not _MODIFIERS.isdisjoint(code.co_names)
        if not _BY_STRING.isdisjoint(code.co_names):
            reach.uses[""] |= {one for one in code.co_consts if isinstance(one, str)}
        called = ""  # of what the last instruction has put onto the stack
        measured = False  # it is the argument of ``len``, so far
        for one in dis.get_instructions(code):
            if one.opname in _IGNORED:
                continue
            if isinstance(one.argval, tuple):  # two variables at once, since Python 3.13
                for name in one.argval:
                    reach.uses.setdefault(name, set()).add(None)
            owner = called
            attribute = one.opname in ("LOAD_ATTR", "LOAD_METHOD")
            if attribute or called:
                length = LENGTH if measured and one.opname == "CALL" and called != "len" else None
                reach.uses.setdefault(called, set()).add(one.argval if attribute else length)
            measured = (
                one.argval == "len"
                if one.opname in _GLOBALS
                else measured and (attribute or one.opname in (*_LOADS, "LOAD_FAST"))
            )
            called = one.argval if attribute or one.opname in _LOADS else ""
            if one.opname == "LOAD_FAST":
                first = code.co_varnames[0] == one.argval and one.argval == SELF
                called = one.argval if first or one.argval == reach.context else ""
            if one.opname in _STORES:
                reach.stores.add(one.argval)
                if not owner or owner != reach.context:
                    reach.assigns.add(one.argval)
                if one.opname.endswith("ATTR"):  # it leads to the object, too
                    reach.uses[""].add(one.argval)
            reach.modifies |= one.opname in _SUBSCRIPT
            if one.opname in _GLOBALS:
                loaded.add(one.argval)
        return loaded

    def _global(self, namespace: dict[str, Any], name: str, step: _Step) -> None:
        value = namespace[name]
        if not isinstance(value, FunctionType | ModuleType | type):
            self._place(namespace, name, name)
        self._ahead.append(_Step(name, name, value, step.hops))

    def _enter_object(self, step: _Step) -> None:
        value, taken = step.value, self._reach.taken(step.called)
        if step.hops >= MAX_HOPS:
            return
        module, measured = isinstance(value, torch.nn.Module), self._only_measured(step)
        # Of what is called so, only attributes are taken: nothing loops over it or calls it.
        named = bool(step.called) and None not in self._reach.uses.get(step.called, {None})
        methods = [
            function
            for cls in type(value).__mro__
            if not is_foreign(cls.__module__)
            for name, member in vars(cls).items()
            if (name in taken or (name in _IMPLICIT and not named) or name == "__getattr__")
            and (function := _function(member))
        ]
        if methods:  # to them the object is ``self``, whatever others call it
            taken = taken | self._reach.uses.get(SELF, set())
        every = is_foreign(type(value).__module__) and not module and not measured
        for name, item in list(getattr(value, "__dict__", {}).items()):
            if not (every or name in taken) or (module and name == "training"):
                continue
            path = f"{step.path}.{name}" if step.path else name
            if not every:
                self._place(value, name, path)
            self._ahead.append(_Step(path, name, item, step.hops + 1))
            if every:  # and code that is not searched does anything with it
                self._ahead.append(_Step(path, "", item, step.hops + 1))
        for cls in type(value).__mro__:
            self._enter_class(cls, value, taken, step.path)
        self._ahead += [step._replace(value=function, called="") for function in methods]

    def _enter_class(self, cls: type, owner: Any, taken: set[str | None], path: str) -> None:
        """Plain values that a class has: code may give the object one of its own."""
        if is_foreign(cls.__module__) or issubclass(cls, torch.nn.Module):
            return
        for name in taken & vars(cls).keys():
            if name and isinstance(vars(cls)[name], PLAIN):
                for holder in (cls, owner):
                    self._place(holder, name, f"{path or cls.__name__}.{name}")


def _takes_first(code: CodeType) -> bool:
    """Whether a method's code may use the object that it is bound to."""
    first = code.co_varnames[:1]
    if not first or first[0] in code.co_cellvars or not _UNNAMED.isdisjoint(code.co_names):
        return True
    used = (one.argval for one in dis.get_instructions(code) if one.opname in _USES)
    return any(first[0] in (one if isinstance(one, tuple) else (one,)) for one in used)


def _parts_of(iterator: Any) -> tuple[Any, ...]:
    """What an iterator of Python's own, such as a ``map``, is made of."""
    return tuple(gc.get_referents(iterator))


def _function(member: Any) -> Any:
    """The function behind a member of a class; None if there is none."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, cached_property):
        return member.func
    member = getattr(member, "__func__", member)
    return member if isinstance(member, FunctionType) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _identity(value: Any) -> object:
    """A plain value itself, as a string so that NaN equals NaN; the id of anything else."""
    if isinstance(value, PLAIN):
        return (type(value).__name__, repr(value))
    return None if isinstance(value, Tensor) else id(value)


def _of_library(function: FunctionType) -> bool:
    """Whether a function is installed: it then knows nothing of the tasks but its arguments."""
    module = function.__module__ or ""
    own = module.partition(".")[0] == "swpipe"
    return is_foreign(module) or (is_installed(function.__code__.co_filename) and not own)
