"""How a stage's value goes to another rank: its structure, and the memory of its tensors.

::

    value ── pack ──> header, tensors            header ── layouts ──> memory, to receive into
                              └─ memory_of ──> bytes on the way ──> ┘ └─ tensor_of ── unpack ──>

A value is any object that can be pickled: tensors, tuples, dicts, dataclasses, None, numbers.
Tensors keep size, strides, dtype, and whether they require gradients: kernels choose the order of
their sums by the strides, so that gradients are equal in every bit only if strides are. What is
sent of a tensor is the memory that it spans; of an expanded dimension that is one element, and gaps
between the elements of a slice are left out.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_KINDS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class TensorLayout(NamedTuple):
    """What a receiver has to know of a tensor.

    Attributes:
        size: Of each dimension.
        stride: Of each dimension, in elements.
        dtype: Of the elements.
        requires_grad: Whether it is to get a gradient.
        device: The type of its device.
        is_conj: Whether its memory has the conjugates of its elements.
        is_neg: Whether its memory has their negatives.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: str
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Return the layout of a tensor.

        Raises:
            TypeError: It is no dense tensor in memory.
        """
        if type(tensor) not in _KINDS or tensor.layout != torch.strided or tensor.is_meta:
            kind = "tensor" if type(tensor) is Tensor else type(tensor).__name__
            layout = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
            raise TypeError(
                f"a {kind} ({layout}) cannot be handed on: give the next stage plain dense "
                "tensors, such as to_dense() or to_local() returns"
            )
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.requires_grad,
            tensor.device.type,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def elements(self) -> int:
        """How many elements are sent."""
        return 0 if 0 in self.size else min(self._span, self._distinct)

    @property
    def _base(self) -> list[int]:
        """The size without what is expanded."""
        return [n if stride else 1 for n, stride in zip(self.size, self.stride, strict=True)]

    @property
    def _distinct(self) -> int:
        return torch.Size(self._base).numel()

    @property
    def _span(self) -> int:
        """From the first to the last element in memory."""
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    def memory_of(self, tensor: Tensor) -> Tensor:
        """Return what is sent of a tensor of this layout, as bytes, (elements * itemsize,)."""
        tensor = self._as_in_memory(tensor.detach())
        if self._span <= self._distinct:
            flat = tensor.as_strided((self._span,), (1,))
        else:
            flat = tensor.as_strided(self._base, self.stride).contiguous().view(-1)
        return flat.view(torch.uint8)

    def tensor_of(self, memory: Tensor) -> Tensor:
        """Return the tensor whose bytes were received."""
        flat = memory.to(self.device).view(self.dtype)
        if 0 in self.size:
            return flat.new_empty(0).as_strided(self.size, self.stride).detach()
        if self._span > self._distinct:  # with gaps, which are not sent
            base, flat = flat.view(self._base), flat.new_empty(self._span)
            flat.as_strided(self._base, self.stride).copy_(base)
        return self._as_in_memory(flat.as_strided(self.size, self.stride)).detach()

    def _as_in_memory(self, tensor: Tensor) -> Tensor:
        """Switch both flags: of a tensor that has them off, of its memory on."""
        tensor = tensor.conj() if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor


class Packed(NamedTuple):
    """A value as a structure and its tensors.

    Attributes:
        header: The structure and the layouts, pickled: equal bytes, equal structures.
        tensors: In the order of the structure; one that occurs twice is there once.
    """

    header: bytes
    tensors: tuple[Tensor, ...]


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and numbers them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.setdefault(id(value), value)
        return [*self.tensors].index(id(value))


class _Unpickler(pickle.Unpickler):
    """Puts tensors in."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def pack(value: Any) -> Packed:
    """Take a value apart.

    Raises:
        TypeError: It cannot be sent; the message names the kind.
    """
    text = io.BytesIO()
    pickler = _Pickler(text)
    try:
        pickler.dump(value)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"a {type(value).__name__} cannot be handed on, since it cannot be pickled ({error}): "
            "give the next stage tensors, tuples, dicts, dataclasses of a module, numbers, or None"
        ) from error
    tensors = tuple(pickler.tensors.values())
    header = pickle.dumps((text.getvalue(), tuple(map(TensorLayout.of, tensors))))
    return Packed(header, tensors)


def layouts_of(header: bytes) -> tuple[TensorLayout, ...]:
    """Return the layouts of the tensors of a value."""
    layouts: tuple[TensorLayout, ...] = pickle.loads(header)[1]
    return layouts


def unpack(header: bytes, tensors: Sequence[Tensor]) -> Any:
    """Put a value together of its tensors."""
    return _Unpickler(io.BytesIO(pickle.loads(header)[0]), tensors).load()
