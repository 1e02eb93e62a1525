"""Objects with state of their own: modules, optimizers, generators, and objects with state_dict.

A trial restores the objects that the user gives, that tasks declare, or that torch shows: each of
them is an ``Owner``, with the modules and optimizers that are its parts. The attributes of no other
object are searched.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from swpipe._values.walk import nodes_in

Named: TypeAlias = tuple[str, Any]
"""A path, such as "model.net.weight", and the object at that path."""

FOREIGN = sys.stdlib_module_names | {"numpy", "torch"}
"""The modules whose objects are not searched."""

WHOLE = (Module, Optimizer, torch.Tensor)
"""The types saved as a whole. Other objects are searched: a state_dict may be incomplete."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""The types without parts."""

REGISTERED = ("_parameters", "_buffers", "_modules")
"""The attributes of modules whose contents torch registers; private in torch 2.13."""

_CLOSED = (*PLAIN, torch.Tensor)

_DICTS = (dict, OrderedDict)
"""The types of which a module has a dozen for its hooks, mostly empty."""

_WRAPPED = ("_dmp_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""The attributes in which wrappers keep the wrapped module; names leave them out."""

_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


def is_foreign(module: str | None) -> bool:
    """Return whether a module is torch's, numpy's or Python's own."""
    return (module or "").partition(".")[0] in FOREIGN


def has_state(value: Any) -> bool:
    """Return whether ``value`` has state to restore.

    It does if it is an object with ``state_dict`` and ``load_state_dict``, a random number
    generator, or a leaf tensor that requires grad; but not if it is a pipeline or loop of swpipe,
    which may be in use.
    """
    if isinstance(value, torch.Tensor):
        return value.requires_grad and value.is_leaf
    return (has_state_dict(value) and not _is_pipeline(value)) or is_generator(value)


def has_state_dict(value: Any) -> bool:
    """Return whether the class of ``value`` has ``state_dict`` and ``load_state_dict``.

    A wrapper may have both methods whatever it wraps; a wrapper of a ``DataLoader`` shows the
    wrapped class as its ``__class__``. The methods are not called: torchdata begins a pass, and
    draws its seed, when its state is requested.
    """
    classes = (type(value), value.__class__) if isinstance(value, DataLoader) else (type(value),)
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(cls, name, None)) for cls in classes for name in names)


def _is_pipeline(value: Any) -> bool:
    """Return whether a value is a pipeline of swpipe, or a loop over one."""
    # The whole MRO: a user's subclass of a pipeline is defined in another module.
    own = any(cls.__module__.partition(".")[0] == "swpipe" for cls in type(value).__mro__)
    return own and (hasattr(type(value), "progress") or hasattr(type(value), "__iter__"))


def is_generator(value: Any) -> bool:
    """Return whether ``value`` is a random generator of torch, Python or numpy."""
    # numpy is optional: if it is not loaded, no value can be one of its generators.
    numpy = sys.modules.get("numpy.random")
    types = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *types))


def modules_in(root: Module) -> Iterator[Module]:
    """Yield ``root`` and all modules below it, including those in plain lists and dicts."""
    return (module for _, module in named_modules_in("", root))


def named_modules_in(name: str, root: Module) -> Iterator[tuple[str, Module]]:
    """Yield ``root`` and all modules below it, with their paths.

    The paths begin with ``name`` and leave wrappers out.
    """
    return _reached(Module, name, root)


def optimizers_in(owner: Any) -> Iterator[Optimizer]:
    """Yield ``owner``, if it is an optimizer, and the optimizers that it wraps, at any depth."""
    reached = _reached(Optimizer, "", owner)
    return (optimizer for _, optimizer in reached if isinstance(optimizer, Optimizer))


def _reached(kind: type, name: str, root: Any) -> Iterator[Named]:
    """Yield ``root`` and the objects of a kind that it leads to, outer before inner, each once."""
    # The objects themselves are kept, so that no freed object's id is used again during the walk.
    visited: dict[int, Any] = {}
    queue = deque([(name, root)])
    while queue:
        # Breadth-first: an object that is reached twice gets its shortest path.
        path, owner = queue.popleft()
        if id(owner) not in visited:
            visited[id(owner)] = owner
            yield path, owner
            queue.extend(_of_kind(kind, path, owner))


def _of_kind(kind: type, path: str, owner: Any) -> Iterator[Named]:
    """Yield the objects of a kind among the attributes, directly or in a plain list or dict."""
    for attribute, value in list(getattr(owner, "__dict__", {}).items()):
        # A module's children are named by their keys in _modules (private in torch 2.13).
        for key, item in value.items() if attribute == "_modules" else [(attribute, value)]:
            wrapped = key in _WRAPPED or (key == "module" and isinstance(owner, _PARALLEL))
            where = path if wrapped else f"{path}.{key}"
            if isinstance(item, kind):
                yield where, item
            # Empty dicts are skipped for speed, see _DICTS.
            elif not isinstance(item, _CLOSED) and not (type(item) in _DICTS and not item):
                for node in nodes_in(item):
                    for index, child in enumerate(node.children):
                        if isinstance(child, kind):
                            yield f"{where}[{node.keys[index] if node.keys else index}]", child


class Owner(NamedTuple):
    """An object with state, and its name in messages, such as "model" or "Linear"."""

    path: str
    owner: Any

    def __str__(self) -> str:
        kind = type(self.owner).__name__
        return self.path if self.path == kind or "(" in self.path else f"{self.path} ({kind})"


class Owners(tuple[Owner, ...]):
    """Owners that the user has not given: any further owner that torch shows is added to them."""

    __slots__ = ()


def given_state(state: Any) -> tuple[Owner, ...]:
    """Return the objects that the user gave: one, several, or a mapping with names.

    Raises:
        TypeError: One of them has no state that can be restored.
    """
    # Already checked when they were shown.
    if isinstance(state, Owners):
        return state
    if isinstance(state, torch.Tensor) or has_state(state):
        state = {"state": state}
    elif not isinstance(state, Mapping):
        state = {f"state[{index}]": owner for index, owner in enumerate(state)}
    owners = tuple(Owner(str(name), owner) for name, owner in state.items())
    for given in owners:
        if not (isinstance(given.owner, torch.Tensor) or has_state(given.owner)):
            raise TypeError(
                f"{given} cannot be restored: give modules, optimizers, generators, tensors, or "
                "objects with state_dict and load_state_dict"
            )
    return owners


def modules_of(owners: Iterable[Owner]) -> Iterator[Module]:
    """Yield the modules among some objects, and all modules below them."""
    for given in owners:
        if isinstance(given.owner, Module):
            yield from modules_in(given.owner)
