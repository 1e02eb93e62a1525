"""Checks that a module is called with the very input that earlier tasks have used for it.

    EmbInputDistStart   batch.ids ── exchange ──>      taken from the batch by a path
    forward             tables(batch.ids)              the argument itself is not used any more

A rewritten forward looks up what was exchanged, whatever its argument. The path was found in one
trace, with one batch; a model that takes another branch later would get embeddings of other ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swpipe._values.walk import tensors_in
from swpipe.tasks.torchrec._torchrec import JaggedTensor, KeyedJaggedTensor
from swpipe.tasks.torchrec.rewriting.inputs import RewriteError

_NOTHING = -1
"""The address of no memory."""


class CallInputs:
    """The arguments of one call, ``values``, and the tensors in them as they are now."""

    same_in_replay = True  # in replays they are not checked

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.values = [*args, *kwargs.values()]
        self.note()

    def note(self) -> None:
        """Take the tensors for unchanged as they are now."""
        tensors = _near(self.values)
        if tensors is None:
            tensors = list(tensors_in(self.values))
        self._versions = [(t, t._version) for t in tensors if not t.is_inference()]

    def forget(self, storages: set[int]) -> None:
        """Let go of tensors in these storages: others may take their place."""
        self._versions = [
            (tensor, version)
            for tensor, version in self._versions
            if tensor.untyped_storage()._cdata not in storages
        ]

    def mismatch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Why another call has other inputs than this one, or "".

        The same inputs in new containers are no others.
        """
        given = [*args, *kwargs.values()]
        if len(given) != len(self.values):
            return "and is called with another one"
        for one, other in zip(given, self.values, strict=True):
            if one is not other and not _same(one, other):
                return "and is called with another one"
        return "which the forward has changed since" if self.changes() else ""

    def refusal(self, what: str, why: str) -> RewriteError:
        """The error for a call with others; ``what`` says what these were used for."""
        return RewriteError(
            f"{what}, {why}. The model's first batch showed which input that is: pass it unchanged "
            "in every batch and mode (a choice between inputs belongs in the batch), or keep the "
            "module out of the pipeline (strict=False)"
        )

    def changes(self) -> set[int]:
        """The memory of tensors that were since changed in place, or took the place of others."""
        known = {id(tensor) for tensor, _ in self._versions}
        found = set()
        for tensor, version in self._versions:
            if tensor._version != version:
                found.add(memory_of(tensor))
        near = _near(self.values)
        if near is not None and known.issubset(map(id, near)):
            return found  # as mostly, and sooner told than by a walk
        present = {id(tensor): tensor for tensor in tensors_in(self.values)}
        if any(
            id(tensor) not in present and not any(_alias(tensor, t) for t in present.values())
            for tensor, _ in self._versions
        ):
            found |= {memory_of(tensor) for key, tensor in present.items() if key not in known}
            found.add(_NOTHING)  # also if nothing took its place
        return found


def memory_of(tensor: Tensor) -> int:
    """The address of the memory that a tensor and its views lie in."""
    return tensor.untyped_storage().data_ptr() or id(tensor)  # empty ones have no memory


_JAGGED = (JaggedTensor, KeyedJaggedTensor)


def _near(values: Sequence[Any]) -> list[Tensor] | None:
    """The tensors of jagged tensors, by their attributes; None where there are other values."""
    found: list[Tensor] = []
    for value in values:
        if type(value) not in _JAGGED:
            return None
        for part in vars(value).values():
            if isinstance(part, Tensor):
                found.append(part)
            elif type(part) is tuple:  # inverse indices
                found += (inner for inner in part if isinstance(inner, Tensor))
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether both are the same input, perhaps in new containers."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _alias(one, other)
    if isinstance(one, _JAGGED):
        return (
            (isinstance(one, JaggedTensor) or one.keys() == other.keys())
            and _alias(one.values(), other.values())
            and _same(one.weights_or_none(), other.weights_or_none())
            and _equal(one.lengths(), other.lengths())
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return isinstance(one, bool | int | float | str | torch.device) and bool(one == other)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether they have equal elements, computed from offsets perhaps."""
    return _alias(one, other) or (
        _has_memory(one) and _has_memory(other) and torch.equal(one, other)
    )


def _alias(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements in memory, or are one whose memory went."""
    return one is other or (
        _has_memory(one)
        and one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _has_memory(tensor: Tensor) -> bool:
    """Whether its memory did not go (see ``released``); an empty one needs none."""
    return tensor.data_ptr() != 0 or tensor.numel() == 0
