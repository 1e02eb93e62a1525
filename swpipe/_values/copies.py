"""Copies of tensors in host memory, to be restored into the same tensors.

A restored tensor has its old identity, memory and values, and its old tensor attributes; a leaf
also has its old ``requires_grad`` and gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

from swpipe._values.storages import span_of
from swpipe._values.walk import inner_tensors, tensors_in, unsharded
from swpipe.device import on_cpu

UNINITIALIZED = (UninitializedBuffer, UninitializedParameter)


class SavedTensors:
    """The copies of some tensors; each tensor is saved once."""

    def __init__(self) -> None:
        self._saved: dict[int, _SavedTensor] = {}

    def add(self, tensor: Tensor) -> None:
        """Save a tensor and its gradient, if any; of a ShardedTensor, the local shards."""
        if hasattr(tensor, "local_shards"):
            for shard in unsharded(tensor):
                self.add(shard)
        elif id(tensor) not in self._saved and not isinstance(tensor, UNINITIALIZED):
            self._saved[id(tensor)] = _SavedTensor(tensor)
            if tensor.is_leaf and tensor.grad is not None:
                self.add(tensor.grad)
            for held in tensors_in(attributes_given(tensor)):
                self.add(held)

    def restore(self) -> None:
        """Restore all saved tensors."""
        for saved in self._saved.values():
            saved.restore()


def attributes_given(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that code has given a tensor.

    Attributes of a library's own kinds of tensors are left out.
    """
    plain = type(tensor) in (Tensor, Parameter) and not hasattr(tensor, "_is_flat_param")
    return vars(tensor) if plain else {}


class _SavedTensor:
    """The copy of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad
        self._grad = tensor.grad if tensor.is_leaf else None
        given = attributes_given(tensor)
        self._attributes = {name: v for name, v in given.items() if isinstance(v, Tensor)}
        # References the original memory, also after the tensor gets other memory through ``.data``.
        # (For a sparse tensor it is the tensor itself.)
        self._memory = tensor.detach() if tensor.layout is torch.strided else tensor
        # Fully sharded modules free the memory of gathered parameters.
        parts = filter(_has_memory, _parts(self._memory))
        self._copies = [(part, _to_host(part)) for part in parts]

    def restore(self) -> None:
        """Restore the tensor, in inference mode if it was made there."""
        tensor = self._tensor
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            self._restore(tensor)

    def _restore(self, tensor: Tensor) -> None:
        """Restore a tensor: its place in autograd, memory, values, gradient and attributes."""
        if self._leaf:
            if tensor.grad_fn is not None:  # an in-place operation made it part of a graph
                tensor.detach_()
            tensor.requires_grad_(self._requires_grad)
        # Memory comes before values: the copies are written into the original memory.
        if not _same_memory(tensor, self._memory):
            tensor.data = self._memory
        for part, saved in self._copies:
            if _has_memory(part):
                # Written in place: views and optimizers that refer to the memory see the old values
                # again.
                part.copy_(saved)
        if self._leaf:
            tensor.grad = self._grad
        vars(tensor).update(self._attributes)


def _has_memory(part: Tensor) -> bool:
    """Return whether a tensor's storage is large enough for all of its elements."""
    strided = part.layout is torch.strided and not inner_tensors(part)
    return not strided or span_of(part)[1] <= part.untyped_storage().nbytes()


def _same_memory(tensor: Tensor, memory: Tensor) -> bool:
    """Return whether two strided tensors have the same memory, shape, strides and type."""
    if tensor.layout is not torch.strided or inner_tensors(tensor):
        return True
    a, b = ((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (tensor, memory))
    return a == b


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield tensors that cover the memory of ``tensor``, with each element once."""
    if inner := inner_tensors(tensor):
        for part in inner:
            yield from _parts(part)
    elif tensor.layout is not torch.strided:
        yield tensor
    elif not tensor.is_meta:
        # All elements along an expanded dimension are the same one.
        dimensions = zip(tensor.shape, tensor.stride(), strict=True)
        first = slice(0, 1)
        everything = slice(None)
        yield tensor[tuple(first if n > 1 and not step else everything for n, step in dimensions)]


def _to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory."""
    with torch.no_grad():
        return tensor.clone() if on_cpu(tensor) else tensor.to("cpu")
