"""A fingerprint of a value: its contents now, to find out later whether the value was modified.

Compared are

- the containers of ``swpipe._values.walk`` and the attributes of objects of user-defined classes:
  which objects they hold, and under which names;
- tensors: version counter (shared with views and ``detach()``, not with ``.data``), whether they
  require grad, ``.grad`` and its version counter. A CPU tensor without a version counter (made in
  inference mode) is compared by value; on a device another stream may be writing it, so it is not
  compared;
- arrays and other buffers: their bytes; of an array of objects, the objects too.

Not opened: parameters, modules, optimizers and other objects with a state of their own, objects of
classes in the standard library, numpy or torch, and of classes with ``same_in_replay = True``.
"""

from __future__ import annotations

import sys
from array import array
from enum import Enum
from functools import cache
from hashlib import blake2b
from itertools import zip_longest
from mmap import mmap
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from swpipe._values.containers import (
    BY_ATTRIBUTES,
    KINDS,
    LEAF,
    TENSOR,
    Kind,
    has_record_stream,
    kind_of,
)
from swpipe._values.stateful import WHOLE, has_state, is_foreign
from swpipe._values.walk import ValueNode, grad_or_none, parts_in, parts_of

_FIXED = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), range, slice, Enum, type),
    *(BuiltinFunctionType, FunctionType, MethodType, ModuleType),
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set unless a type is written in C
_BUFFERS = (bytearray, memoryview, array, mmap)
_CLOSED = Kind()
_OBJECTS = Kind(lambda value: value.flat)


class Fingerprint:
    """The contents of a value: containers, objects, tensors and buffers, at any depth.

    Args:
        value: The value.
        objects: Whether to look at values other than tensors and containers, too.

    Attributes:
        value: The value.
        leaves: All values that were not opened, each once; values that cannot change are left out.
        nodes: All containers and opened objects.
        tensors: All tensors, except for parameters.
    """

    def __init__(self, value: Any, *, objects: bool = True) -> None:
        self.value = value
        self.nodes: list[ValueNode] = []
        self.leaves: list[Any] = []
        self.tensors: list[Tensor] = []
        self._states: list[TensorState] = []
        self._buffers: list[tuple[Any, bytes]] = []
        for part, kind, children in parts_in(value, _part if objects else None):
            # Parameters belong to their module: training them does not modify the value that holds
            # them.
            if isinstance(part, Parameter):
                self.leaves.append(part)
            elif kind is TENSOR:
                self.tensors.append(part)
                self._states.append(TensorState(part))
            # All opened kinds but _OBJECTS are nodes: an array of objects is compared by its bytes,
            # and the objects in it are parts of their own.
            elif kind is not _CLOSED and kind is not _OBJECTS:
                self.nodes.append(ValueNode(part, tuple(kind.keys(part)), children))
            elif (digest := _digest(part)) is not None:
                self._buffers.append((part, digest))
            else:
                self.leaves.append(part)

    def changed(self) -> bool:
        """Return whether anything in the value was modified in place since."""
        return (
            # The cheapest comparison first; buffers are read in full and come last.
            any(not same_node(node, ValueNode.of(node.value)) for node in self.nodes)
            or any(state.changed() for state in self._states)
            or any(_digest(buffer) != digest for buffer, digest in self._buffers)
        )


def is_fixed(value: Any) -> bool:
    """Return whether ``value`` cannot change: a number, a string, a function, a class and so on."""
    numpy = sys.modules.get("numpy")
    return (
        KINDS.get(type(value)) is LEAF
        or isinstance(value, _FIXED)
        or type(value) is object
        or (numpy is not None and isinstance(value, numpy.generic | numpy.dtype))
    )


def is_object(value: Any) -> bool:
    """Return whether ``value`` is of a user's Python class that is not opened as a container."""
    cls: Any = type(value)
    return (
        kind_of(cls) is LEAF
        and not is_foreign(cls.__module__)
        and _all_in_attributes(cls)
        and not isinstance(value, (*WHOLE, *_FIXED))
        and not has_state(value)
        and not replays_itself(value)
    )


def replays_itself(value: Any) -> bool:
    """Return whether the class of ``value`` declares that iterations may share its objects.

    The declaration is ``same_in_replay = True``.
    """
    return bool(getattr(type(value), "same_in_replay", False))


@cache
def _all_in_attributes(cls: Any) -> bool:
    """Return whether a class is written in Python: its objects consist of attributes only."""
    builtin = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
    # A __new__ written in C could keep data that no attribute shows.
    new: object = cls.__new__
    plain: object = object.__new__
    return builtin is object and (new is plain or isinstance(new, FunctionType))


def _part(leaf: Any) -> Kind | None:
    """Return how a fingerprint opens a leaf; None for a leaf that cannot change."""
    if is_fixed(leaf):
        return None
    if is_object(leaf):
        return BY_ATTRIBUTES
    # numpy is optional: if it is not loaded, no value can be of its types.
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(leaf, numpy.ndarray)
    return _OBJECTS if is_array and leaf.dtype == object else _CLOSED


class TensorState:
    """A tensor, and the properties that show whether it is modified in place from now on."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._flags = (version_of(tensor), tensor.requires_grad)
        self._grad = grad_or_none(tensor)
        self._grad_version = None if self._grad is None else version_of(self._grad)
        # Without a version counter, a tensor on the CPU is compared by value.
        self._copy = tensor.clone() if tensor.is_cpu and tensor.is_inference() else None

    def changed(self) -> bool:
        """Return whether the tensor or its gradient was modified since."""
        tensor = self.tensor
        return (
            self._flags != (version_of(tensor), tensor.requires_grad)
            or self.grad_changed()
            or (self._copy is not None and not same_bits(tensor, self._copy))
        )

    def grad_changed(self) -> bool:
        """Return whether the tensor's gradient was set, dropped or modified since."""
        grad = grad_or_none(self.tensor)
        return grad is not self._grad or (
            grad is not None and version_of(grad) != self._grad_version
        )


def version_of(tensor: Tensor) -> int | None:
    """Return the version counter, or None without one: made in inference mode, or still lazy."""
    # Tensor._version is private in torch 2.13; it raises for the tensors that are excluded here.
    return None if is_lazy(tensor) or tensor.is_inference() else tensor._version


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors on the CPU are equal bit for bit."""
    return a.shape == b.shape and all(
        x.dtype == y.dtype and torch.equal(_bytes(x), _bytes(y))  # as bytes, NaN equals NaN
        for x, y in zip(parts_of(a), parts_of(b), strict=True)
    )


def same_node(before: ValueNode, now: ValueNode) -> bool:
    """Return whether a container holds the same objects, apart from lazily computed attributes."""
    lazy = _lazy_keys(before, now) if has_record_stream(type(now.value)) else set()
    return _ids(before, lazy) == _ids(now, lazy)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _digest(value: Any) -> bytes | None:
    """Return a digest of the memory of an array or another buffer; None for other values."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        # Data type and shape can be changed in place while the bytes stay the same.
        content = value.tobytes() + str((value.dtype, value.shape)).encode()
    elif isinstance(value, _BUFFERS):
        content = bytes(value)
    else:
        return None
    return blake2b(content, digest_size=16).digest()


def _ids(node: ValueNode, ignored: set[Any]) -> list[tuple[int, int]]:
    """Return the ids of keys and children, in order; sequences have no keys."""
    items = zip_longest(node.keys, node.children)
    return [(id(key), id(child)) for key, child in items if key not in ignored]


def _lazy_keys(before: ValueNode, now: ValueNode) -> set[Any]:
    """Return the private attributes that did not exist before, or were None."""
    known = dict(zip(before.keys, before.children, strict=False))
    return {key for key in now.keys if key.startswith("_") and known.get(key) is None}
