"""Checks that a module is called with the very input whose ids were exchanged for it.

    EmbInputDistStart   batch.ids ── exchange ──>      taken from the batch by a path
    forward             tables(batch.ids)              the argument itself is not used any more

A rewritten forward looks up what was exchanged, whatever its argument. The path was found in one
trace, with one batch; a model that takes another branch later would get embeddings of other ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from swpipe._tensors.pytree import tensors_in
from swpipe.tasks.sparse_dist.inputs import Found, RewriteError


class ExchangedInputs:
    """The inputs of one batch that are exchanged, by module."""

    def __init__(self, batch: Any, forwards: Iterable[Any]) -> None:
        self._inputs: dict[str, tuple[list[Any], list[tuple[Tensor, int]]]] = {}
        for forward in forwards:
            args, kwargs = forward.args.build_args_kwargs(batch)
            given = [*args, *kwargs.values()]
            versions = [(t, t._version) for t in tensors_in(given) if not t.is_inference()]
            self._inputs[forward.name] = given, versions

    def check(self, forward: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuse a call with anything else.

        Raises:
            RewriteError: An argument is another object with other values, or has been changed.
        """
        exchanged, versions = self._inputs[forward.name]
        given = [*args, *kwargs.values()]
        equal = len(given) == len(exchanged) and all(map(_same, given, exchanged))
        if equal and all(tensor._version == version for tensor, version in versions):
            return
        what = "which the forward has changed since" if equal else "and is called with another one"
        raise RewriteError(
            f"module {forward.name!r}: its input {Found(forward.args)} was exchanged between the "
            f"ranks ahead of the forward, {what}. The model's first batch showed which input that "
            "is: pass it unchanged in every batch and mode (a choice between inputs belongs in "
            "the batch), or keep the module out of the pipeline (strict=False)"
        )


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
            and torch.equal(one.lengths(), other.lengths())  # computed from offsets, perhaps
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return isinstance(one, bool | int | float | str) and bool(one == other)


def _alias(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements in memory."""
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )
