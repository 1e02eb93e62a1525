"""Checksums of the memory of batches: they show writes, and tell batches apart.

A tensor counts its modifications, except those through an array that shares its memory; an array
counts none. So there is a checksum, too: of a sample of all memory on the host. A write between
the sampled bytes, to memory without a counter, is not detected.
"""

from __future__ import annotations

import ctypes
import math
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from swpipe._values.containers import has_record_stream
from swpipe._values.stateful import PLAIN
from swpipe._values.walk import leaves_in, nodes_in, tensors_held

_COMPARED_BYTES = 1024
"""The approximate number of bytes that are sampled of a tensor or array; all if it has fewer."""

_SAMPLED_BYTES = 256
"""The number of bytes of a string that are compared."""

_MOST_LEAVES = 256
"""The maximum number of numbers, strings, arrays and other objects of a batch that are compared."""

Content = tuple[int, int]
"""The version counter of a tensor (0 for an array), and a checksum."""


def parts_of(batch: Any) -> tuple[list[Any], int]:
    """Return a batch's tensors and arrays, and a checksum of its other parts.

    The checksum covers containers, numbers and strings: the number of parts of each container, its
    keys, and the values.
    """
    # The limits below bound the time that a pull spends here, whatever the batch is.
    several = batch if type(batch) in (tuple, list) else (batch,)
    # A subclass of Tensor may hold other tensors, and is searched.
    if all(type(part) is Tensor for part in several):  # the common case needs no search
        return [*several], 0
    leaves = [*islice(leaves_in(batch), _MOST_LEAVES)]
    # numpy is not imported here: a batch cannot have an array if nobody has loaded it.
    arrays = getattr(sys.modules.get("numpy"), "ndarray", ())
    buffers = [*tensors_held(batch), *(leaf for leaf in leaves if isinstance(leaf, arrays))]
    nodes = [*islice(nodes_in(batch), _MOST_LEAVES)]
    keys = islice(chain.from_iterable(node.keys for node in nodes), _MOST_LEAVES)
    plain = [
        value[:_SAMPLED_BYTES] if isinstance(value, str | bytes) else value
        for value in (*leaves, *keys)
        if isinstance(value, PLAIN)
    ]
    shape = [len(node.children) for node in nodes]
    return buffers, crc32(repr((shape, plain)).encode())


def _piece(buffer: Any) -> tuple[int, int] | None:
    """Return address and size of contiguous memory, (0, 0) if not on the host; else None."""
    if isinstance(buffer, Tensor):
        if buffer.layout is not torch.strided or not buffer.is_cpu:
            return 0, 0
        return (buffer.data_ptr(), buffer.nbytes) if buffer.is_contiguous() else None
    if buffer.dtype.hasobject:
        return 0, 0
    if buffer.flags.c_contiguous:
        return buffer.__array_interface__["data"][0], buffer.nbytes
    return None


def _pieces(buffer: Any) -> tuple[int, tuple[int, ...]]:
    """Return the address of the first item, and the steps between items, in bytes."""
    if isinstance(buffer, Tensor):
        return buffer.data_ptr(), tuple(step * buffer.itemsize for step in buffer.stride())
    return buffer.__array_interface__["data"][0], buffer.strides


def span_of(buffer: Any) -> tuple[int, int]:
    """Return the addresses of a buffer's first byte and behind its last one; equal if none."""
    piece = _piece(buffer)
    if piece is not None:
        return piece[0], sum(piece)
    address, steps = _pieces(buffer)
    # Steps may be negative in an array (a[::-1]): its lowest address is before its first item.
    far = [(length - 1) * step for length, step in zip(buffer.shape, steps, strict=True)]
    before = sum(min(0, way) for way in far)
    behind = sum(max(0, way) for way in far)
    return address + before, address + behind + buffer.itemsize


def _sample(buffer: Any, most: int) -> bytes:
    """Return about ``most`` bytes from all over a buffer on the host; all if it has fewer."""
    piece = _piece(buffer)
    size = buffer.itemsize
    if piece is not None:
        address, total = piece
        if total <= most:
            return ctypes.string_at(address, total)
        memory = memoryview((ctypes.c_ubyte * total).from_address(address))
        # An odd step visits different bytes of the items: an even one could see the same byte of
        # each item only. The first and the last item are always sampled.
        sample = memory[:: total // most | 1].tobytes()
        return b"".join((sample, memory[:size].tobytes(), memory[-size:].tobytes()))
    address, steps = _pieces(buffer)
    items = math.prod(buffer.shape)
    found = []
    # Items that are not contiguous: the number of an item gives its index in each dimension.
    for number in (*range(0, items, max(1, items * size // most) | 1), items - 1):
        place = address
        rest = number
        for length, step in zip(reversed(buffer.shape), reversed(steps), strict=True):
            rest, index = divmod(rest, length)
            place += index * step
        found.append(ctypes.string_at(place, size))
    return b"".join(found)


def content_of(buffer: Any) -> Content:
    """Return the version counter and the checksum that change when a buffer is written."""
    version = 0
    if isinstance(buffer, Tensor):
        try:
            version = buffer._version
        except RuntimeError:
            # An inference tensor has no counter; is_inference() would release the interpreter lock.
            version = 0
    return version, crc32(_sample(buffer, _COMPARED_BYTES))


class Buffer(NamedTuple):
    """A tensor or array with its contents at some time.

    Attributes:
        reference: A weak reference to it.
        content: The version counter and checksum at that time.
        begin: The address of its first byte on the host.
        end: The address behind its last byte.
    """

    reference: weakref.ref[Any]
    content: Content
    begin: int
    end: int


def described(buffer: Any) -> Buffer:
    """Return a tensor or array with its current contents."""
    return Buffer(weakref.ref(buffer), content_of(buffer), *span_of(buffer))


class Parts(NamedTuple):
    """The checksums that tell a batch from others, in another process, too.

    Attributes:
        structure: A checksum of its containers, numbers and strings.
        buffers: Shape, dtype and a checksum of a sample of each tensor and array.
    """

    structure: int
    buffers: list[tuple[Sequence[int], Any, int]]

    @classmethod
    def of(cls, batch: Any, most: int = _COMPARED_BYTES) -> Parts:
        """Return the checksums of a batch, from about ``most`` bytes of each tensor or array."""
        buffers, structure = parts_of(batch)
        return cls(
            structure, [(one.shape, one.dtype, crc32(_sample(one, most))) for one in buffers]
        )

    @property
    def checksums(self) -> list[int]:
        """The checksums as integers: the structure first, then one for each tensor or array."""
        forms = ((*shape, str(dtype), sample) for shape, dtype, sample in self.buffers)
        return [self.structure, *(crc32(repr(form).encode()) for form in forms)]


def checksum_of(parts: Parts) -> int:
    """Return one checksum of all parts of a batch."""
    return crc32(repr(parts.checksums).encode())


def has_parts(batch: Any, saved: Sequence[int]) -> bool:
    """Return whether a batch still has the parts of which checksums were saved.

    Parts may have been added to an object with a ``record_stream`` method: reading it may compute
    attributes.
    """
    now = Parts.of(batch).checksums
    # torchrec's KeyedJaggedTensor, for one, computes offsets from its lengths when they are read.
    if any(has_record_stream(type(node.value)) for node in nodes_in(batch)):
        return Counter(saved[1:]) <= Counter(now[1:])
    return [*saved] == now
