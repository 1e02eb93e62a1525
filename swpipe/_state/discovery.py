"""Find the objects that the tasks change outside the context: models, optimizers, generators.

The search starts at the tasks' functions and follows::

    bound method  ->  self                           partial  ->  function, arguments
    function      ->  closure, defaults, and the globals it names (also via the user's functions)
    object        ->  its attributes                 list, tuple, set, dict  ->  its items
    cache of a function  ->  function

``has_state`` defines what counts as state. The search follows the attributes of at most two objects
in a row, runs no code of the objects, and does not enter torch or the standard library.

Other threads may change the objects meanwhile, as tasks do: what a container holds is copied in one
step before the search follows it.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch

from swpipe._tensors.pytree import nodes_in
from swpipe._tensors.stateful import PLAIN, WHOLE, has_state, is_foreign, is_generator
from swpipe.core.task import PipelineTask

MAX_HOPS = 2
"""How many times in a row the search may follow an attribute."""

MAX_ITEMS = 1000
"""Larger containers are data, not state."""

CACHE: Any = type(lru_cache(lambda: None))
"""What ``functools`` makes of a function."""

BOUND = (BuiltinFunctionType, MethodWrapperType)
"""Methods that are written in C, of an object or of a module."""


class Found(NamedTuple):
    """An object that the search found, and the path to it, such as ``"self.model"``."""

    path: str
    owner: Any

    def __str__(self) -> str:
        return f"{self.path} ({type(self.owner).__name__})"


def find_state(tasks: Iterable[PipelineTask]) -> tuple[Found, ...]:
    """Every object with state that the functions of the tasks and of their io can reach."""
    found = [one for one in find_all(tasks) if has_state(one.owner)]
    inside: set[int] = set()
    for module in (one.owner for one in found if isinstance(one.owner, torch.nn.Module)):
        inside |= {id(child) for child in module.modules() if child is not module}
        inside |= {id(parameter) for parameter in module.parameters()}
    return tuple(one for one in found if id(one.owner) not in inside)


def find_all(
    tasks: Iterable[PipelineTask],
    max_hops: int = MAX_HOPS,
) -> Iterator[Found]:
    """Every object that the functions of the tasks and of their io can reach, nearest first.

    Each object is yielded once, on its shortest path; objects of the types in ``WHOLE`` are not
    searched. Last come objects that only the memory of declared states leads to, except for
    parameters and buffers of modules found before.

    Args:
        tasks: The tasks.
        max_hops: How many times in a row the search may follow an attribute.
    """
    tasks = tuple(tasks)
    declared = [io for task in tasks for io in task.io]
    functions = [
        *(task.fn for task in tasks),
        *(fn for io in declared for fn in (io.capture, io.restore) if fn),
    ]
    seen: dict[int, Any] = {}
    modules: list[torch.nn.Module] = []
    for found in _walk([_Step("", fn, 0) for fn in functions], seen, max_hops):
        yield found
        if isinstance(found.owner, torch.nn.Module):
            modules.append(found.owner)
    for module in modules:
        seen |= {id(one): one for one in (*module.parameters(), *module.buffers())}
    memory = [
        _Step(io.state, io.memory, 0) for io in declared if io.state and io.memory is not None
    ]
    yield from _walk(memory, seen, max_hops)


def optimizers_in(owner: Any) -> Iterator[torch.optim.Optimizer]:
    """``owner``, if it is an optimizer, and those that it wraps, at any depth."""
    seen: dict[int, Any] = {}
    ahead = [owner]
    while ahead:
        one = ahead.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, torch.optim.Optimizer):
            yield one
        for value in dict(getattr(one, "__dict__", {})).values():
            items = [value, *(child for node in nodes_in(value) for child in node.children)]
            ahead += [item for item in items if isinstance(item, torch.optim.Optimizer)]


def given_state(state: Any) -> tuple[Found, ...]:
    """The objects that the user gave: one, several, or a mapping with names.

    Raises:
        TypeError: One of them has no state that can be restored.
    """
    if isinstance(state, torch.Tensor) or has_state(state):
        state = {"state": state}
    elif not isinstance(state, Mapping):
        state = {f"state[{index}]": owner for index, owner in enumerate(state)}
    found = tuple(Found(str(name), owner) for name, owner in state.items())
    for one in found:
        if not (isinstance(one.owner, torch.Tensor) or has_state(one.owner)):
            raise TypeError(
                f"{one} cannot be restored: give modules, optimizers, generators, tensors, or "
                "objects with state_dict and load_state_dict"
            )
    return found


class _Step(NamedTuple):
    path: str
    value: Any
    hops: int

    def to(self, name: str, value: Any, hops: int = 0) -> _Step:
        path = f"{self.path}.{name}" if self.path and name else self.path or name
        return _Step(path, value, self.hops + hops)


def _walk(
    start: Iterable[_Step],
    seen: dict[int, Any],
    max_hops: int,
) -> Iterator[Found]:
    """Breadth-first search: each object is found on its shortest path.

    ``seen`` has the objects found before, and keeps them alive, so that ids are not reused.
    """
    while start:
        near, far = deque(start), list[_Step]()
        while near:
            step = near.popleft()
            if isinstance(step.value, PLAIN):
                yield Found(step.path, step.value)
                continue
            if id(step.value) in seen:
                continue
            seen[id(step.value)] = step.value
            yield Found(step.path, step.value)
            if isinstance(step.value, torch.nn.Module):
                near.extend(_kept_by_modules(step))
            if isinstance(step.value, WHOLE):
                continue
            for child in _children(step, max_hops):
                (far if child.hops > step.hops else near).append(child)
        start = far


def _kept_by_modules(step: _Step) -> Iterator[_Step]:
    """What a user's module keeps, as a trainer does, and the user's hooks of parameters.

    These are optimizers, schedulers and generators; a hook may step one, whatever the module.
    """
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
    for module in step.value.modules():
        for name, value in list(vars(module).items()) if _is_users(type(module)) else ():
            if isinstance(value, kinds) or is_generator(value):
                yield step.to(name, value)
    for parameter in step.value.parameters():
        for hook in [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()]:
            if _is_users(getattr(hook, "func", hook)):
                yield step.to("hook", hook)


def _is_users(defined: Any) -> bool:
    """Whether a class or a function is neither Python's or torch's nor installed."""
    file = getattr(sys.modules.get(defined.__module__), "__file__", None) or ""
    installed = any(part in file for part in ("site-packages", "dist-packages"))
    return not (installed or is_foreign(defined.__module__))


def _children(step: _Step, max_hops: int) -> Iterator[_Step]:
    value = step.value
    if isinstance(value, MethodType):
        yield step.to("", value.__func__)
        yield step.to("self", value.__self__)
    elif isinstance(value, BOUND):
        if not isinstance(value.__self__, ModuleType):
            yield step.to("self", value.__self__)
    elif isinstance(value, FunctionType):
        yield from _of_function(step, value)
    elif isinstance(value, partial):
        yield step.to("", value.func)
        yield from (step.to(f"args[{i}]", arg) for i, arg in enumerate(value.args))
        yield from (step.to(name, arg) for name, arg in [*value.keywords.items()])
    elif isinstance(value, CACHE):
        yield step.to("", value.__wrapped__)
    elif isinstance(value, dict | list | tuple | set | frozenset | deque):
        yield from _of_container(step, value)
    elif not isinstance(value, ModuleType | type) and step.hops < max_hops:
        yield from (step.to(name, item, hops=1) for name, item in attributes_of(value).items())
        if not is_foreign(type(value).__module__):
            yield step.to("", vars(type(value)).get("__call__"))


def _of_container(step: _Step, value: Any) -> Iterator[_Step]:
    if isinstance(value, defaultdict):
        yield step.to("default_factory", value.default_factory)
    if len(value) > MAX_ITEMS:
        return
    if isinstance(value, dict):
        yield from (step.to(key_name(key), item) for key, item in dict.copy(value).items())
    else:
        yield from (step.to(f"[{i}]", item) for i, item in enumerate([*value]))


def key_name(key: Any) -> str:
    """What paths call a key; for one that is no plain value its class, since no code is run."""
    return str(key) if type(key) in PLAIN else type(key).__name__


def _of_function(step: _Step, function: FunctionType) -> Iterator[_Step]:
    if is_foreign(function.__module__):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty as yet
            yield step.to(name, cell.cell_contents)
    yield from (step.to("default", value) for value in function.__defaults__ or ())
    yield from (step.to(name, value) for name, value in [*(function.__kwdefaults__ or {}).items()])
    names = set(_names_in(function.__code__))
    for name, value in list(function.__globals__.items()):
        if name not in names or isinstance(value, type):
            continue
        if not isinstance(value, ModuleType):
            yield step.to(name, value)
        elif not is_foreign(value.__name__):
            inside = vars(value)
            yield from (step.to(f"{name}.{n}", inside[n]) for n in names if n in inside)


def _names_in(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in the code, and in functions defined in it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that an object has itself, also those in slots; no code is run."""
    kind: Any = threading.local if issubclass(type(value), threading.local) else object
    held: dict[str, Any] = {}
    with suppress(AttributeError, TypeError):
        held.update(kind.__getattribute__(value, "__dict__"))
    for cls in type(value).__mro__:
        for name, member in [*vars(cls).items()]:
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # an empty slot
                    held[name] = member.__get__(value)
    return held
