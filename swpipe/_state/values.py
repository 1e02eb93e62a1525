"""Python values outside the context that tasks can change: saved, and put back.

    what                                                       saved
    closures, functions, and the globals that code names       which object each name has
    objects of the user's classes, and these classes           which object each attribute has
    containers, arrays, files and others                       what ``put_back`` saves
    modules of the user's classes, and of ``torch.nn``         numbers, strings and containers
    hooks of modules                                           the user's
    tensors                                                    attributes that code has given them
    the environment (``os.environ``)                           its variables

Each object is put back as it was, so that what leads from one to the other is, too. What belongs
to an installed library is left alone: it may hold on to threads, files and other processes, and
would be put back in part. ``PUT_BACK`` and ``_KNOWN`` are those of which this does not matter.

Two searches find them: ``find_all``, which knows nothing of names, and ``reach_of``, which follows
all that code names, also into libraries.
"""

from __future__ import annotations

import collections
import os
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from swpipe._state.code_names import read_code
from swpipe._state.copies import attributes_given
from swpipe._state.discovery import (
    BOUND,
    CACHE,
    content_of,
    dict_of,
    find_all,
    is_installed,
    kept_by_cache,
    slots_of,
)
from swpipe._state.kinds import CONTAINERS, NAMESPACES, is_unchanging
from swpipe._state.put_back import (
    copied,
    is_copyable_iterator,
    is_lost,
    position_of,
    saving,
)
from swpipe._state.reach import reach_of, reaches_of
from swpipe._state.reached import Reach
from swpipe._tensors.stateful import FOREIGN, PLAIN, WHOLE, modules_in
from swpipe.core.task import PipelineTask

MAX_ITEMS = 10**6
"""Larger containers are taken for data and not saved."""

PUT_BACK = ("accelerate", "torchmetrics")
"""Installed libraries whose objects are counters and flags of a loop: put back as the user's."""

MAX_HOPS = 32
"""How many attributes in a row are followed."""

_KNOWN = (
    *NAMESPACES, collections.UserDict, collections.UserList, collections.UserString,
    collections.ChainMap, queue.Queue, threading.Event, weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary, weakref.WeakSet, threading.local,
)  # fmt: skip
"""Types of the standard library whose objects are put back as the user's."""

_FUNCTIONS = (FunctionType, MethodType, *BOUND, CACHE, partial)
_NOTHING = object()
_LAZY = torch.nn.modules.lazy.LazyModuleMixin


class SavedValues:
    """The Python values that tasks can change, as they are now.

    Attributes:
        lost: What tasks may change and nobody can put back, such as generators; with the task.
    """

    def __init__(self, tasks: Sequence[PipelineTask]) -> None:
        self._restores: list[Callable[[], object]] = []
        self._seen: dict[Any, Any] = {}
        self._copies: dict[int, tuple[Any, Any, object]] = {}  # iterator, a copy, its position
        self._new: dict[int, Any] = {}  # id to the copy that all its holders get
        reaches = reaches_of(tasks)
        for found in find_all(tasks, MAX_HOPS, is_users):
            self._save(found.owner)
        for reach in reaches.values():
            for number in reach.owned:
                self._save(reach.holders[number])
        self._save(getattr(os.environ, "_data", None))
        self.lost = tuple(one for name, reach in reaches.items() for one in _lost(name, reach))

    def restore(self) -> None:
        """Put everything back, also what comes after a failure."""
        advanced = {n: c for n, (one, c, at) in self._copies.items() if position_of(one) != at}
        self._new = {number: copied(saved) for number, saved in advanced.items()}
        with ExitStack() as stack:
            for restore in reversed(self._restores):
                stack.callback(restore)

    def _save(self, value: Any) -> None:
        if isinstance(value, MethodType):
            value = value.__func__
        if id(value) in self._seen or isinstance(value, PLAIN) or is_unchanging(value):
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._save_function(value)
        elif isinstance(value, CellType):
            self._save_cell(value)
        elif isinstance(value, torch.nn.Module):
            for module in modules_in(value):
                self._save_module(module)
        elif isinstance(value, type):
            self._save_class(value)
        elif isinstance(value, partial):
            self._save_partial(value)
        elif is_copyable_iterator(value):
            self._copies[id(value)] = value, copied(value), position_of(value)
        elif isinstance(value, torch.Tensor):
            self._save_tensor(value)
        elif not isinstance(value, (*BOUND, tuple, frozenset)):
            self._save_object(value)

    def _save_partial(self, value: Any) -> None:
        self._save(value.keywords)
        held = value.func, value.args
        self._restores.append(lambda: _set_partial(value, *map(self._now, held)))

    def _save_object(self, value: Any) -> None:
        if (put_back := saving(value, MAX_ITEMS)) is not None:
            self._restores.append(partial(self._put_back, value, put_back))
        for one in kept_by_cache(value) if isinstance(value, CACHE) else ():
            self._save(one)
        if is_users(value):
            self._save_attributes(value)
            self._save_class(type(value))

    def _put_back(self, value: Any, put_back: Callable[[], object]) -> None:
        put_back()
        if self._new and isinstance(value, dict | list | deque):
            for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (new := self._now(item)) is not item:
                    value[key] = new

    def _now(self, value: Any) -> Any:
        """What holders get back: the object itself, or a copy of an iterator that was advanced.

        Also a copy of a tuple or of a method that has one, since these cannot be changed.
        """
        if self._new and id(value) not in self._new:
            new = value
            if isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_make")):
                items = [self._now(item) for item in value]
                if any(one is not item for one, item in zip(items, value, strict=True)):
                    new = getattr(value, "_make", tuple)(items)
            elif isinstance(value, BOUND):
                owner = self._now(value.__self__)
                if owner is not value.__self__:
                    new = getattr(owner, value.__name__)
            if new is value:
                return value
            self._new[id(value)] = new
        return self._new.get(id(value), value)

    def _save_function(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            self._save(cell)
        code = read_code(function.__code__, "")
        self._save_names(function.__globals__, code.names | code.loaded)
        for name in code.names & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, ModuleType) and is_users(value):
                self._save_names(vars(value), code.names)
        if is_users(sys.modules.get(function.__module__ or "", sys)):
            self._restores.append(
                partial(_refill_dict, vars(function), dict(vars(function)), self._now)
            )
            self._save(function.__kwdefaults__)
            defaults = function.__defaults__
            self._restores.append(lambda: _set_defaults(function, self._now(defaults)))

    def _save_cell(self, cell: CellType) -> None:
        content = content_of(cell, _NOTHING)
        self._save(content)
        self._restores.append(lambda: _set_cell(cell, self._now(content)))

    def _save_names(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        saved = {name: namespace.get(name, _NOTHING) for name in names}
        for value in saved.values():
            self._save_class(value)
        self._restores.append(partial(_set_names, namespace, saved, self._now))

    def _save_class(self, value: Any) -> None:
        for cls in value.__mro__ if isinstance(value, type) else ():
            if (id(cls), "class") not in self._seen and is_users(cls):
                self._seen[id(cls), "class"] = cls
                values = {n: v for n, v in vars(cls).items() if _is_attribute(n, v)}
                self._restores.append(partial(_set_class, cls, values, self._now))
                for held in values.values():
                    if isinstance(held, CONTAINERS):
                        self._save(held)
                for member in vars(cls).values():
                    if isinstance(held := getattr(member, "__func__", member), CACHE):
                        self._save(held)

    def _save_attributes(self, value: Any) -> None:
        if (held := dict_of(value)) is not None:
            self._restores.append(partial(_refill_dict, held, dict(held), self._now))
        held_now = dict(slots_of(value))
        slots = [
            (slot, slot.__get__(value) if name in held_now else _NOTHING)
            for name, slot in slots_of(value, empty=True)
        ]
        if slots and not isinstance(value, BaseException):
            self._restores.append(partial(_set_slots, value, slots, self._now))

    def _save_tensor(self, tensor: torch.Tensor) -> None:
        held = attributes_given(tensor)
        self._restores.append(partial(_set_attributes, held, dict(held), self._now))
        for value in held.values():
            self._save(value)

    def _save_module(self, module: torch.nn.Module) -> None:
        """Save the user's hooks, and what is no tensor and no module."""
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                self._restores.append(partial(_set_hooks, hooks, dict(hooks)))
        of_torch = type(module).__module__.startswith(("torch.nn.modules.", "torch.nn.utils."))
        if isinstance(module, _LAZY) or not (of_torch or is_users(module)):
            return
        attributes = {n: v for n, v in vars(module).items() if n not in _OF_MODULE}
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            self._save(tensor)
        registered = [dict(vars(module)[name]) for name in _REGISTERED]
        cls = type(module)
        members = cls, {name: one for name, one in vars(cls).items() if isinstance(one, property)}
        self._restores.append(
            partial(_set_module, module, members, attributes, registered, self._now)
        )
        for value in attributes.values():
            if isinstance(value, CONTAINERS) or (is_users(value) and not isinstance(value, WHOLE)):
                self._save(value)


_OF_MODULE = frozenset(vars(torch.nn.Module()))


def _lost(task: str, reach: Reach) -> list[str]:
    """What a task's code leads to and nobody can put back."""
    return [
        f"{path or 'an object'} ({type(reach.holders[number]).__name__}) of task {task!r}"
        for number, path in reach.owned.items()
        if is_lost(reach.holders[number]) or _keeps_draws(reach.holders[number])
    ]


def _keeps_draws(value: Any) -> bool:
    """Whether it is a cache that cannot be put back, of what a function has drawn."""
    if not isinstance(value, CACHE) or None in value.cache_parameters().values():
        return False
    has_some = bool(value.cache_info().currsize)
    return has_some and bool(reach_of(PipelineTask("cached", value.__wrapped__)).draws)


def is_users(value: Any) -> bool:
    """Whether an object, or a class or module itself, is of the user's own code."""
    name = value.__name__ if isinstance(value, ModuleType) else _class_of(value).__module__
    root = (name or "").partition(".")[0]
    if isinstance(value, _KNOWN):
        return True
    if root in FOREIGN or root == "swpipe":
        return isinstance(value, (*_FUNCTIONS, *CONTAINERS, tuple))
    return root in PUT_BACK or not is_installed(getattr(sys.modules.get(name), "__file__", None))


def _is_attribute(name: str, value: Any) -> bool:
    """Whether a member of a class is a value of the user's."""
    return not (name.startswith("__") and name.endswith("__")) and not hasattr(
        type(value), "__get__"
    )


def _set_hooks(hooks: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Put hooks back; a library's new ones stay, such as those that shard a module on first use."""
    new = {key: hook for key, hook in hooks.items() if key not in saved}
    kept = saved | {key: hook for key, hook in new.items() if not _is_users_hook(hook)}
    _refill_dict(hooks, kept, lambda hook: hook)


def _is_users_hook(hook: Any) -> bool:
    name = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return name.startswith("torch.nn.utils") or is_users(sys.modules.get(name, sys))


def _class_of(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def _set_cell(cell: CellType, content: Any) -> None:
    if content_of(cell, _NOTHING) is content:
        return
    if content is _NOTHING:
        del cell.cell_contents
    else:
        cell.cell_contents = content


def _set_defaults(function: FunctionType, defaults: tuple[Any, ...] | None) -> None:
    if function.__defaults__ is not defaults:
        function.__defaults__ = defaults


def _set_partial(value: Any, func: Any, args: Any) -> None:
    if value.func is not func or value.args is not args:
        value.__setstate__((func, args, value.keywords, vars(value)))


def _set_names(namespace: dict[str, Any], saved: dict[str, Any], now: Callable[[Any], Any]) -> None:
    for name, before in saved.items():
        value = now(before)
        if namespace.get(name, _NOTHING) is value:
            continue
        if value is _NOTHING:
            del namespace[name]
        else:
            namespace[name] = value


def _set_class(cls: Any, saved: dict[str, Any], now: Callable[[Any], Any]) -> None:
    for name, value in list(vars(cls).items()):
        if _is_attribute(name, value) and name not in saved:
            delattr(cls, name)
    for name, before in saved.items():
        if vars(cls).get(name, _NOTHING) is not (value := now(before)):
            setattr(cls, name, value)


def _set_slots(owner: Any, saved: Sequence[tuple[Any, Any]], now: Callable[[Any], Any]) -> None:
    filled = {slot for _, slot in slots_of(owner)}
    for slot, before in saved:
        content = slot.__get__(owner) if slot in filled else _NOTHING
        if content is not (value := now(before)):
            slot.__delete__(owner) if value is _NOTHING else slot.__set__(owner, value)


def _set_module(
    module: Any,
    members: tuple[type, dict[str, Any]],
    attributes: dict[str, Any],
    registered: Sequence[dict[str, Any]],
    now: Callable[[Any], Any],
) -> None:
    """Put back a module's class, attributes, parameters, buffers and modules."""
    cls, properties = members
    if type(module) is not cls:
        module.__class__ = cls
    for name in properties.keys() - vars(cls).keys():  # torch has taken a parametrized one away
        setattr(cls, name, properties[name])
    _set_attributes(vars(module), attributes, now, _OF_MODULE)
    for name, items in zip(_REGISTERED, registered, strict=True):
        _refill_dict(vars(module)[name], items, lambda item: item)


def _set_attributes(
    held: dict[str, Any],
    saved: dict[str, Any],
    now: Callable[[Any], Any],
    kept: frozenset[str] = frozenset(),
) -> None:
    """What a library has added on first use stays, unless it is a value or a tensor."""
    for name in [n for n in held if n not in kept and n not in saved]:
        marked = name.startswith("_dynamo_")  # by torch.compile, at the first call
        given = isinstance(held[name], (*PLAIN, *WHOLE, *CONTAINERS)) or is_users(held[name])
        if given and not marked:
            del held[name]
    for name, before in saved.items():
        if held.get(name, _NOTHING) is not (value := now(before)):
            held[name] = value


_REGISTERED = ("_parameters", "_buffers", "_modules")


def _refill_dict(held: dict[Any, Any], saved: dict[Any, Any], now: Callable[[Any], Any]) -> None:
    """Put the items back, in their order, if others are there now."""
    items = {key: now(value) for key, value in saved.items()}
    same = list(held) == list(items) and all(held[key] is items[key] for key in items)
    if not same:
        held.clear()
        held.update(items)
