"""Checks that a module is called with the very input that earlier tasks have used for it.

    EmbInputDistStart   batch.ids ── exchange ──>      taken from the batch by a path
    forward             tables(batch.ids)              the argument itself is not used any more

A rewritten forward looks up what was exchanged, whatever its argument. The path was found in one
trace, with one batch; a model that takes another branch later would get embeddings of other ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from swpipe._tensors.containers import kind_of
from swpipe._tensors.pytree import tensors_in
from swpipe.tasks.torchrec.inputs import Found, RewriteError, Source

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
        tensors = (tensor for tensor in tensors_in(self.values) if not tensor.is_inference())
        self._versions = [(tensor, tensor._version) for tensor in tensors]

    def forget(self, storages: set[int]) -> None:
        """Let go of tensors in these storages: others may take their place."""
        self._versions = [
            (tensor, version)
            for tensor, version in self._versions
            if tensor.untyped_storage()._cdata not in storages
        ]

    def match(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether another call has the same inputs, perhaps in new containers."""
        given = [*args, *kwargs.values()]
        return len(given) == len(self.values) and all(map(_same, given, self.values))

    def changed(self) -> bool:
        """Whether a tensor was since changed in place, or replaced by one in other memory."""
        return bool(self.changes())

    def changes(self) -> set[int]:
        """The memory of tensors that were changed in place, or took the place of others."""
        found = {memory_of(t) for t, version in self._versions if t._version != version}
        near = {id(child) for value in self.values for child in _opened(value)}
        if all(id(tensor) in near for tensor, _ in self._versions):
            return found  # as mostly, and sooner told than by a walk
        present = {id(tensor): tensor for tensor in tensors_in(self.values)}
        known = {id(tensor) for tensor, _ in self._versions}
        if any(
            id(tensor) not in present and not any(_alias(tensor, t) for t in present.values())
            for tensor, _ in self._versions
        ):
            found |= {memory_of(tensor) for key, tensor in present.items() if key not in known}
            found.add(_NOTHING)  # also if nothing took its place
        return found


class ExchangedInputs:
    """The inputs of one batch that are exchanged, by module."""

    def __init__(self, source: Source, forwards: Iterable[Any]) -> None:
        self._inputs = {
            forward.name: CallInputs(*forward.args.build_args_kwargs(source))
            for forward in forwards
        }

    @property
    def calls(self) -> list[CallInputs]:
        """The inputs of each module."""
        return [*self._inputs.values()]

    def values(self) -> list[Any]:
        """All inputs."""
        return [value for call in self.calls for value in call.values]

    def check(self, forward: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse a call with anything else.

        Raises:
            RewriteError: An argument is another object with other values, or has been changed.
        """

        def what() -> str:
            return (
                f"module {forward.name!r}: its input {Found(forward.args)} was exchanged between "
                "the ranks ahead of the forward"
            )

        check_call(what, self._inputs[forward.name], args, kwargs)


def check_call(
    what: Callable[[], str], used: CallInputs, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuse a call whose inputs are not those that were used; ``what`` says what for.

    Raises:
        RewriteError: An argument is another object with other values, or has been changed.
    """
    equal = used.match(args, kwargs)
    if equal and not used.changed():
        return
    why = "which the forward has changed since" if equal else "and is called with another one"
    raise RewriteError(
        f"{what()}, {why}. The model's first batch showed which input that "
        "is: pass it unchanged in every batch and mode (a choice between inputs belongs in "
        "the batch), or keep the module out of the pipeline (strict=False)"
    )


def memory_of(tensor: Tensor) -> int:
    """The address of the memory that a tensor and its views lie in."""
    return tensor.untyped_storage().data_ptr() or id(tensor)  # empty ones have no memory


def _same(one: Any, other: Any) -> bool:
    """Whether both are the same input, perhaps in new containers."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _alias(one, other)
    if isinstance(one, JaggedTensor | KeyedJaggedTensor):
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


def _opened(value: Any) -> Iterable[Any]:
    """A value, and what is in it one level deep."""
    return value, *kind_of(type(value)).children(value)


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
