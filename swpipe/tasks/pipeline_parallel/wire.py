"""The format in which a stage's value is sent: its structure, and the memory of its tensors.

::

    value ── pack ──> header, tensors            header ── layouts ──> memory, to receive into
                              └─ memory_of ──> bytes that are sent ─> ┘ └─ tensor_of ── unpack ──>

A value is any object that can be pickled: tensors, tuples, dicts, dataclasses, None, numbers.
Tensors keep their size, strides, dtype and ``requires_grad``. Kernels choose the order of their
sums by the strides, so gradients are equal in every bit only if the strides are equal. The memory
that a tensor spans is sent; an expanded dimension is sent as one element, and the gaps between the
elements of a slice are not sent.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Other subclasses, for example DTensor, have state outside their memory, which would get lost.
_KINDS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class TensorLayout(NamedTuple):
    """The properties of a tensor that a receiver needs to rebuild it from bytes.

    Attributes:
        size: The size of each dimension.
        stride: The stride of each dimension, in elements.
        dtype: The type of the elements.
        requires_grad: Whether the tensor requires a gradient.
        device: The type of the tensor's device.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        grad = ", requires_grad" if self.requires_grad else ""
        return f"{dtype} {list(self.size)} with strides {list(self.stride)}{grad}"

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Return the layout of a tensor.

        Raises:
            TypeError: The tensor is not a plain dense tensor in memory.
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
        )

    @property
    def elements(self) -> int:
        """The number of elements that are sent."""
        # The span where elements overlap, or are dense; the distinct elements where there are gaps.
        return 0 if 0 in self.size else min(self._span, self._distinct)

    @property
    def _base(self) -> list[int]:
        """The size, with 1 for each expanded dimension, whose stride is 0."""
        return [n if stride else 1 for n, stride in zip(self.size, self.stride, strict=True)]

    @property
    def _distinct(self) -> int:
        return torch.Size(self._base).numel()

    @property
    def _span(self) -> int:
        """The number of elements from the first to the last element in memory, gaps included."""
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    def memory_of(self, tensor: Tensor) -> Tensor:
        """Return the bytes to send of a tensor of this layout, of shape (elements * itemsize,)."""
        tensor = tensor.detach()
        if self._span <= self._distinct:
            # No gaps: the memory is sent as it is, without a copy.
            flat = tensor.as_strided((self._span,), (1,))
        else:
            flat = tensor.as_strided(self._base, self.stride).contiguous().view(-1)
        return flat.view(torch.uint8)

    def tensor_of(self, memory: Tensor) -> Tensor:
        """Return the tensor of this layout from its received bytes."""
        flat = memory.to(self.device).view(self.dtype)
        if 0 in self.size:
            return flat.new_empty(0).as_strided(self.size, self.stride).detach()
        if self._span > self._distinct:
            # Only the elements were sent: put them between the gaps again, to keep the strides.
            base = flat.view(self._base)
            flat = flat.new_empty(self._span)
            flat.as_strided(self._base, self.stride).copy_(base)
        return flat.as_strided(self.size, self.stride).detach()


class Packed(NamedTuple):
    """A value, separated into its structure and its tensors.

    Attributes:
        header: The structure and the layouts, pickled. Values with equal headers have equal
            structures.
        tensors: The tensors in the order in which they occur, without repetitions.
    """

    header: bytes
    tensors: tuple[Tensor, ...]


class _Pickler(pickle.Pickler):
    """A pickler that replaces tensors by their numbers, and collects them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        # By identity, so that a tensor that occurs twice is one tensor at the receiver, too.
        self.tensors.setdefault(id(value), value)
        return [*self.tensors].index(id(value))


class _Unpickler(pickle.Unpickler):
    """An unpickler that replaces numbers by the tensors that they stand for."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def pack(value: Any) -> Packed:
    """Separate a value into its structure and its tensors.

    Raises:
        TypeError: The value cannot be pickled, or has a tensor that is not dense.
    """
    text = io.BytesIO()
    pickler = _Pickler(text)
    try:
        pickler.dump(value)
    # Pickle raises any of these, depending on the Python version and on why it failed.
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"a {type(value).__name__} cannot be handed on, since it cannot be pickled ({error}): "
            "give the next stage tensors, tuples, dicts, dataclasses of a module, numbers, or None"
        ) from error
    # The memory of a lazily conjugated or negated tensor has other elements than the tensor.
    tensors = tuple(tensor.resolve_conj().resolve_neg() for tensor in pickler.tensors.values())
    header = pickle.dumps((text.getvalue(), tuple(map(TensorLayout.of, tensors))))
    return Packed(header, tensors)


def layouts_of(header: bytes) -> tuple[TensorLayout, ...]:
    """Return the layouts of a value's tensors from its header."""
    layouts: tuple[TensorLayout, ...] = pickle.loads(header)[1]
    return layouts


def unpack(header: bytes, tensors: Sequence[Tensor]) -> Any:
    """Rebuild a value from its header and its tensors."""
    return _Unpickler(io.BytesIO(pickle.loads(header)[0]), tensors).load()
