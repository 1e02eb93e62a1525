"""Tells which tensors changed that a snapshot does not save: those of plain objects within modules.

A snapshot saves the tensors among a module's attributes. It does not look into other objects there:
a module has many, which share tensors with it or belong to a library, and what they consist of is
not known. So their tensors are only watched, by version counter and identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from swpipe._state.copies import SavedTensors
from swpipe._tensors.stateful import FOREIGN, PLAIN, WHOLE

MAX_ITEMS = 1000
"""Larger containers are data, not state."""

MAX_DEPTH = 4
"""How many objects and containers deep a module's attribute is searched."""

_SKIPPED = (*PLAIN, *WHOLE, FunctionType, MethodType, ModuleType, type)


class UnsavedTensors:
    """The tensors of plain objects within modules, as they are now.

    Args:
        modules: All modules that are saved.
        saved: What is saved; tensors that share memory with it are not watched.
    """

    def __init__(self, modules: Iterable[nn.Module], saved: SavedTensors) -> None:
        self._modules = tuple(modules)
        known = saved.addresses()
        self._before = {
            path: (tensor, tensor._version)
            for path, tensor in self._tensors()
            if tensor.untyped_storage().data_ptr() not in known
        }

    def changed(self) -> list[str]:
        """The paths at which a tensor was modified or replaced since."""
        return [
            path
            for path, tensor in self._tensors()
            if path in self._before and not _same(tensor, *self._before[path])
        ]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        seen: dict[int, Any] = {}
        for module in self._modules:
            for name, value in list(vars(module).items()):
                yield from _inside(f"{type(module).__name__}.{name}", value, MAX_DEPTH, seen)


def _inside(
    path: str, value: Any, depth: int, seen: dict[int, Any]
) -> Iterator[tuple[str, Tensor]]:
    if type(value) in (Tensor, nn.Parameter):
        if value.layout is torch.strided and not value.is_inference():
            yield path, value
    elif depth and id(value) not in seen and _is_plain(value):
        seen[id(value)] = value
        for name, child in _children(value):
            yield from _inside(f"{path}{name}", child, depth - 1, seen)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return True
    return (
        not isinstance(value, _SKIPPED) and type(value).__module__.partition(".")[0] not in FOREIGN
    )


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        if len(value) > MAX_ITEMS:
            return []
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(_index(key, number), child) for number, (key, child) in enumerate(items)]
    return [(f".{name}", child) for name, child in dict(getattr(value, "__dict__", {})).items()]


def _index(key: Any, number: int) -> str:
    return f"[{key!r}]" if type(key) in PLAIN else f"[{_key_name(key)} {number}]"


def _same(tensor: Tensor, before: Tensor, version: int) -> bool:
    return tensor is before and tensor._version == version


def _key_name(key: Any) -> str:
    """What paths call a key; for one that is no plain value its class, since no code is run."""
    return str(key) if type(key) in PLAIN else type(key).__name__
