"""The memory of a batch that was pulled ahead, and what shows that somebody has written it since.

A tensor counts its modifications, but for those through an array that shares its memory; an array
counts none. So there is a checksum, too: of the first and the last bytes, of all that is on the
host. A write between them, to memory without a counter, is not seen.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from swpipe._values.stateful import PLAIN
from swpipe._values.walk import leaves_in, tensors_held

_CHECKED_BYTES = 1024
"""At either end."""

_SAMPLED_BYTES = 256
"""About so many of a tensor or array tell a batch from others."""

_MOST_LEAVES = 256
"""So many numbers, strings, arrays and other objects of a batch are looked at."""

Content = tuple[int, int]
"""A version counter, and a checksum."""


class Buffer(NamedTuple):
    """A tensor or array, and its content at one moment."""

    value: Any
    content: Content

    @property
    def is_changed(self) -> bool:
        """Whether it was written since."""
        return content_of(self.value) != self.content

    def is_used_again(self, now: Buffer) -> bool:
        """Whether what is at the same place now may have another content."""
        other = isinstance(now.value, Tensor) and now.value is not self.value
        return other or now.content != self.content


class BatchAsPulled:
    """A batch as it was pulled.

    Attributes:
        batch: The batch, if it is kept.
        memory: Address to the tensor or array there.

    Args:
        batch: The batch.
        keep: Whether it will be given again, as the same object.
    """

    def __init__(self, batch: Any, *, keep: bool) -> None:
        self.batch = batch if keep else None
        self._buffers = [Buffer(one, content_of(one)) for one in buffers_in(batch)]
        self.memory = {
            address: one for one in self._buffers if (address := _address_of(one.value)) is not None
        }
        self._leaves = _leaves_of(batch) if keep else []

    def is_used_again_by(self, later: BatchAsPulled) -> bool:
        """Whether a later batch is in memory of this one, with another content."""
        own, other = self.memory, later.memory
        both = own.keys() & other.keys()
        return bool(both) and any(own[one].is_used_again(other[one]) for one in both)

    def changed(self) -> list[Any]:
        """The tensors and arrays that were written since, and what was taken out of the batch."""
        found = [one.value for one in self._buffers if one.is_changed]
        if self.batch is not None:
            left = {id(one) for one in (*buffers_in(self.batch), *_leaves_of(self.batch))}
            parts = (*(one.value for one in self._buffers), *self._leaves)
            found += [one for one in parts if id(one) not in left]
        return found


def buffers_in(batch: Any) -> list[Any]:
    """A batch's tensors, and arrays of numpy."""
    if _is_tensors(batch):
        return [batch] if type(batch) is Tensor else [*batch]
    found: list[Any] = [*tensors_held(batch)]
    arrays = getattr(sys.modules.get("numpy"), "ndarray", ())
    return found + [one for one in _leaves_of(batch) if isinstance(one, arrays)]


def _leaves_of(batch: Any) -> list[Any]:
    return [] if _is_tensors(batch) else [*islice(leaves_in(batch), _MOST_LEAVES)]


def _is_tensors(batch: Any) -> bool:
    """Whether it is a tensor or a few of them, as most are: there is nothing to search."""
    parts = batch if type(batch) in (tuple, list) else (batch,)
    return all(type(one) is Tensor for one in parts)


def content_of(buffer: Any) -> Content:
    """What tells that a tensor or array was written."""
    if not isinstance(buffer, Tensor):
        where = buffer.__array_interface__
        size = buffer.nbytes if where["strides"] is None else 0
        return 0, _checksum(where["data"][0], size)
    try:
        version = buffer._version
    except RuntimeError:  # an inference tensor; is_inference() lets go of the interpreter lock
        version = 0
    if type(buffer) is not Tensor or not buffer.is_cpu or not _has_address(buffer):
        return version, 0
    return version, _checksum(buffer.data_ptr(), buffer.nbytes if buffer.is_contiguous() else 0)


def _checksum(address: int, size: int) -> int:
    """Of that memory; 0 if it is not in one piece."""
    if not size:
        return 0
    first = crc32(ctypes.string_at(address, min(size, _CHECKED_BYTES)))
    rest = min(size - _CHECKED_BYTES, _CHECKED_BYTES)
    return crc32(ctypes.string_at(address + size - rest, rest), first) if rest > 0 else first


def checksum_of(batch: Any) -> int:
    """Of a sample of its bytes on the host, of shapes, numbers and strings.

    It tells a batch from others in another process, too.
    """
    found: list[Any] = [
        one[:_CHECKED_BYTES] if isinstance(one, str | bytes) else one
        for one in _leaves_of(batch)
        if isinstance(one, PLAIN)
    ]
    for one in buffers_in(batch):
        found += [*one.shape, str(one.dtype), _sampled(one)]
    return crc32(repr(found).encode())


def _sampled(buffer: Any) -> int:
    """Of some of its bytes, at the same distance from each other; 0 if it is not in one piece."""
    if isinstance(buffer, Tensor):
        if not (buffer.is_cpu and _has_address(buffer) and buffer.is_contiguous()):
            return 0
        address = buffer.data_ptr()
    elif buffer.dtype.hasobject or not buffer.flags.c_contiguous:
        return 0
    else:
        address = buffer.ctypes.data
    memory = memoryview((ctypes.c_ubyte * buffer.nbytes).from_address(address))
    return crc32(memory[:: buffer.nbytes // _SAMPLED_BYTES | 1].tobytes())


def _has_address(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and bool(tensor.data_ptr())


def _address_of(buffer: Any) -> int | None:
    """Where its memory begins; None if it has none."""
    if not isinstance(buffer, Tensor):
        return int(buffer.__array_interface__["data"][0]) if buffer.size else None
    return buffer.data_ptr() if _has_address(buffer) else None


class Watched:
    """Something of a batch, which is let go when nobody else has it; a number or string is kept."""

    def __init__(self, part: Any) -> None:
        self._expired: Callable[[], bool] = lambda: False
        if isinstance(part, Tensor) and torch._C._has_storage(part):
            self._expired = StorageWeakRef(part.untyped_storage()).expired  # type: ignore[no-untyped-call]
        elif type(part).__weakrefoffset__:
            while isinstance(getattr(part, "base", None), type(part)):  # a view of an array
                part = part.base
            reference = weakref.ref(part)
            self._expired = lambda: reference() is None

    @property
    def is_there(self) -> bool:
        """Whether somebody has it."""
        return not self._expired()
