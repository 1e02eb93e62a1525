"""Checks that a module is called with the same input that earlier tasks have used for it.

    EmbInputDistStart   batch.ids ── exchange ──>      taken from the batch by a path
    forward             tables(batch.ids)              the argument itself is no longer used

A replaced forward looks up what was exchanged, whatever its argument. The path was found in one
trace, with one batch. A model that takes another branch later would get embeddings of other ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swpipe.tasks.torchrec._torchrec import JaggedTensor, KeyedJaggedTensor
from swpipe.tasks.torchrec.rewriting.inputs import RewriteError
from swpipe.values import tensors_in


class CallInputs:
    """The arguments of one call, ``values``, and the current versions of the tensors in them."""

    # A shortcut may replay this object as it is: replayed inputs are not checked.
    same_in_replay = True

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.values = [*args, *kwargs.values()]
        self.note()

    def note(self) -> None:
        """Record the current versions of the tensors; later changes are relative to these."""
        # torch counts in-place writes of a tensor in the private _version. Inference tensors have
        # none.
        self._versions = [
            (tensor, tensor._version)
            for tensor in _tensors(self.values)
            if not tensor.is_inference()
        ]

    def forget(self, storages: set[int]) -> None:
        """Stop tracking the tensors in these storages, which other tensors may replace."""
        self._versions = [
            (tensor, version)
            for tensor, version in self._versions
            if tensor.untyped_storage()._cdata not in storages
        ]

    def mismatch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return why another call has inputs other than this call's, or "".

        The same tensors in new containers count as the same inputs.
        """
        given = [*args, *kwargs.values()]
        if len(given) != len(self.values) or not all(map(_same, given, self.values)):
            return "and is called with another one"
        return "which the forward has changed since" if self.changed() else ""

    def refusal(self, what: str, why: str) -> RewriteError:
        """Return the error for a call with other inputs; ``what`` says how these were used."""
        return RewriteError(
            f"{what}, {why}. The model's first batch showed which input that is: pass it unchanged "
            "in every batch and mode (a choice between inputs belongs in the batch), or keep the "
            "module out of the pipeline (strict=False)"
        )

    def changed(self) -> bool:
        """Return whether a tensor was changed in place or replaced since the call."""
        present = {id(tensor): tensor for tensor in _tensors(self.values)}
        for tensor, version in self._versions:
            if tensor._version != version:
                return True
            if id(tensor) not in present and not any(_alias(tensor, t) for t in present.values()):
                return True
        return False


_JAGGED = (JaggedTensor, KeyedJaggedTensor)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors in values; of jagged tensors alone, those in their attributes."""
    # The attributes of jagged tensors are read without the walk, since this is done in every step.
    if not all(type(value) in _JAGGED for value in values):
        return list(tensors_in(values))
    parts = [part for value in values for part in vars(value).values()]
    # Inverse indices are a tuple with a tensor.
    parts += [inner for part in parts if type(part) is tuple for inner in part]
    return [part for part in parts if isinstance(part, Tensor)]


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are the same input, perhaps in new containers."""
    if value is other:
        return True
    # torch.fx keeps lists and dicts as immutable ones, which are lists and dicts.
    if not isinstance(other, type(value)):
        return False
    if isinstance(value, Tensor):
        return _alias(value, other)
    if isinstance(value, _JAGGED):
        # A jagged tensor may be made anew from the same values. Lengths are compared by value,
        # since either tensor may have computed them from its offsets.
        return (
            (isinstance(value, JaggedTensor) or value.keys() == other.keys())
            and _alias(value.values(), other.values())
            and _same(value.weights_or_none(), other.weights_or_none())
            and _equal(value.lengths(), other.lengths())
        )
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_same(value[key], other[key]) for key in value)
    return isinstance(value, bool | int | float | str | torch.device) and bool(value == other)


def _equal(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, by memory or by elements."""
    return _alias(tensor, other) or (
        _has_memory(tensor) and _has_memory(other) and torch.equal(tensor, other)
    )


def _alias(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same elements in memory, or are the same object."""
    return tensor is other or (
        _has_memory(tensor)
        and tensor.data_ptr() == other.data_ptr()
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.dtype == other.dtype
    )


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has its memory (see ``released``); an empty tensor needs none."""
    return tensor.data_ptr() != 0 or tensor.numel() == 0
