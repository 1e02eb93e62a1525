"""Python values outside the context that tasks can change: saved, and put back.

    what                                                       saved
    closures, and the globals that code names                  which object each name has
    objects of the user's classes, and these classes           which object each attribute has
    lists, dicts, sets, deques and bytearrays                  their items
    modules of the user's classes, and of ``torch.nn``         numbers, strings and containers
    hooks of modules                                           the user's

Each object is put back as it was, so that what leads from one to the other is, too. What belongs
to an installed library is left alone: it may hold on to threads, files and other processes, and
would be put back in part. ``PUT_BACK`` are those of which this is known not to matter.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from swpipe._state.discovery import (
    FOREIGN,
    PLAIN,
    WHOLE,
    Found,
    content_of,
    find_all,
    is_installed,
    names_in,
)
from swpipe._state.snapshot import modules_in
from swpipe.core.task import PipelineTask

MAX_ITEMS = 10**6
"""Larger containers are taken for data and not saved."""

PUT_BACK = ("accelerate",)
"""Installed libraries whose objects are counters and flags of a loop: put back as the user's."""

MAX_HOPS = 4
"""How many attributes in a row are followed."""

CONTAINERS = (list, dict, set, deque, bytearray)
_NOTHING = object()
_LAZY = torch.nn.modules.lazy.LazyModuleMixin


class SavedValues:
    """The Python values that tasks can change, as they are now."""

    def __init__(self, tasks: Iterable[PipelineTask]) -> None:
        self._restores: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}
        for found in find_all(tasks, MAX_HOPS, is_users):
            self._save(found)

    def restore(self) -> None:
        """Put everything back."""
        for restore in self._restores:
            restore()

    def _save(self, found: Found) -> None:
        value = found.owner
        if isinstance(value, MethodType):
            value = value.__func__
        if isinstance(value, FunctionType):
            self._save_function(value)
        elif isinstance(value, CONTAINERS):
            self._save_container(value)
        elif isinstance(value, torch.nn.Module):
            for module in modules_in(value):
                self._save_module(module)
        elif isinstance(value, type):
            self._save_class(value)
        elif is_users(value) and not isinstance(value, (*PLAIN, *WHOLE, tuple, frozenset, partial)):
            self._save_attributes(vars(value) if hasattr(value, "__dict__") else {})
            self._save_slots(value)
            self._save_class(type(value))

    def _save_function(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            content = content_of(cell, _NOTHING)
            self._restores.append(partial(_set_cell, cell, content))
        names = set(names_in(function.__code__))
        self._save_names(function.__globals__, names)
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, ModuleType) and is_users(value):
                self._save_names(vars(value), names)

    def _save_names(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        saved = {name: namespace.get(name, _NOTHING) for name in names}
        for value in saved.values():
            self._save_class(value)
        self._restores.append(partial(_set_names, namespace, saved))

    def _save_class(self, value: Any) -> None:
        for cls in value.__mro__ if isinstance(value, type) else ():
            if id(cls) not in self._seen and is_users(cls):
                self._seen[id(cls)] = cls
                values = {n: v for n, v in vars(cls).items() if isinstance(v, PLAIN)}
                self._restores.append(partial(_set_attributes, cls, values))
                for held in vars(cls).values():
                    if isinstance(held, CONTAINERS):
                        self._save_container(held)

    def _save_container(self, value: Any) -> None:
        if id(value) not in self._seen and len(value) <= MAX_ITEMS:
            self._seen[id(value)] = value
            self._restores.append(partial(_refill, value, _items(value)))

    def _save_attributes(self, attributes: dict[str, Any]) -> None:
        if id(attributes) not in self._seen:
            self._seen[id(attributes)] = attributes
            self._restores.append(partial(_refill, attributes, dict(attributes)))

    def _save_slots(self, value: Any) -> None:
        names = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
        saved = {name: getattr(value, name) for name in names if hasattr(value, name)}
        if saved:
            self._restores.append(partial(_set_attributes, value, saved))

    def _save_module(self, module: torch.nn.Module) -> None:
        """Save the user's hooks, and what is no tensor and no module."""
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                self._restores.append(partial(_set_hooks, hooks, dict(hooks)))
        of_torch = type(module).__module__.startswith("torch.nn.modules.")
        if isinstance(module, _LAZY) or not (of_torch or is_users(module)):
            return
        known = set(vars(torch.nn.Module()))
        attributes = {n: v for n, v in vars(module).items() if n not in known}
        values = {n: v for n, v in attributes.items() if isinstance(v, PLAIN)}
        self._restores.append(partial(_set_plain, module, values, known))
        for value in attributes.values():
            if isinstance(value, CONTAINERS):
                self._save_container(value)


def is_users(value: Any) -> bool:
    """Whether an object, or a class or module itself, is of the user's own code."""
    name = value.__name__ if isinstance(value, ModuleType) else _class_of(value).__module__
    root = (name or "").partition(".")[0]
    if root in FOREIGN or root == "swpipe":
        return isinstance(value, (FunctionType, MethodType, partial, *CONTAINERS, tuple))
    return root in PUT_BACK or not is_installed(getattr(sys.modules.get(name), "__file__", None))


def _set_hooks(hooks: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Put hooks back; a library's new ones stay, such as those that shard a module on first use."""
    new = {key: hook for key, hook in hooks.items() if key not in saved}
    _refill(hooks, saved | {key: hook for key, hook in new.items() if not _is_users_hook(hook)})


def _is_users_hook(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    return is_users(sys.modules.get(getattr(function, "__module__", ""), sys))


def _class_of(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def _set_cell(cell: CellType, content: Any) -> None:
    if content_of(cell, _NOTHING) is content:
        return
    if content is _NOTHING:
        del cell.cell_contents
    else:
        cell.cell_contents = content


def _set_names(namespace: dict[str, Any], saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if namespace.get(name, _NOTHING) is value:
            continue
        if value is _NOTHING:
            del namespace[name]
        else:
            namespace[name] = value


def _set_attributes(owner: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if getattr(owner, name, _NOTHING) is not value:
            setattr(owner, name, value)


def _set_plain(module: torch.nn.Module, saved: dict[str, Any], known: set[str]) -> None:
    held = vars(module)
    for name in [n for n, v in held.items() if isinstance(v, PLAIN)]:
        if name not in known and name not in saved:
            del held[name]
    held.update(saved)


def _items(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else copy.copy(container)


def _refill(container: Any, items: Any) -> None:
    """Put the items back, if others are there now; an object's own comparison is not run."""
    now, then = list(_flat(container)), list(_flat(items))
    if len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True)):
        return
    container.clear()
    if isinstance(container, dict | set):
        container.update(items)
    else:
        container.extend(items)


def _flat(container: Any) -> Iterator[Any]:
    if not isinstance(container, dict):
        yield from container
        return
    for key, item in container.items():
        yield from (key, item)
