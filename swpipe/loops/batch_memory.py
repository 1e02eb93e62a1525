"""The memory of batches: what shows that somebody has written it, and what tells batches apart.

A tensor counts its modifications, but for those through an array that shares its memory; an array
counts none. So there is a checksum, too: of a sample of all that is on the host, from its whole
memory. A write between the bytes of the sample, to memory without a counter, is not seen.
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
"""About so many show that a tensor or array was written; all of them if there are fewer."""

_SAMPLED_BYTES = 256
"""So many of a string are looked at."""

_MOST_LEAVES = 256
"""So many numbers, strings, arrays and other objects of a batch are looked at."""

Content = tuple[int, int]
"""A version counter, and a checksum."""


def parts_of(batch: Any) -> tuple[list[Any], int]:
    """Return a batch's tensors and arrays, and a checksum of its other parts.

    These are its containers, numbers and strings: how many parts each container has, its keys, and
    the values.
    """
    several = batch if type(batch) in (tuple, list) else (batch,)
    if all(type(part) is Tensor for part in several):  # nothing to search
        return [*several], 0
    leaves = [*islice(leaves_in(batch), _MOST_LEAVES)]
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
    """Return address and size of memory in one piece, 0 if it is not on the host; else None."""
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
    """Return the addresses of its first byte, and behind its last one; the same for none."""
    piece = _piece(buffer)
    if piece is not None:
        return piece[0], sum(piece)
    address, steps = _pieces(buffer)
    far = [(length - 1) * step for length, step in zip(buffer.shape, steps, strict=True)]
    before = sum(min(0, way) for way in far)
    behind = sum(max(0, way) for way in far)
    return address + before, address + behind + buffer.itemsize


def _sample(buffer: Any, most: int) -> bytes:
    """About so many bytes of what is on the host, from all over it; all if there are fewer."""
    piece = _piece(buffer)
    size = buffer.itemsize
    if piece is not None:
        address, total = piece
        if total <= most:
            return ctypes.string_at(address, total)
        memory = memoryview((ctypes.c_ubyte * total).from_address(address))
        sample = memory[:: total // most | 1].tobytes()
        return b"".join((sample, memory[:size].tobytes(), memory[-size:].tobytes()))
    address, steps = _pieces(buffer)
    items = math.prod(buffer.shape)
    found = []
    for number in (*range(0, items, max(1, items * size // most) | 1), items - 1):
        place = address
        rest = number
        for length, step in zip(reversed(buffer.shape), reversed(steps), strict=True):
            rest, index = divmod(rest, length)
            place += index * step
        found.append(ctypes.string_at(place, size))
    return b"".join(found)


def content_of(buffer: Any) -> Content:
    """What tells that a tensor or array was written."""
    version = 0
    if isinstance(buffer, Tensor):
        try:
            version = buffer._version
        except RuntimeError:  # an inference tensor; is_inference() lets go of the interpreter lock
            version = 0
    return version, crc32(_sample(buffer, _COMPARED_BYTES))


class Buffer(NamedTuple):
    """A tensor or array as it was.

    Attributes:
        reference: To it, weak: one that is gone nobody else has.
        content: What it had.
        begin: The address of its first byte on the host.
        end: Behind its last one.
    """

    reference: weakref.ref[Any]
    content: Content
    begin: int
    end: int


def described(buffer: Any) -> Buffer:
    """Return a tensor or array as it is now."""
    return Buffer(weakref.ref(buffer), content_of(buffer), *span_of(buffer))


class Parts(NamedTuple):
    """What tells a batch from others, in another process, too.

    Attributes:
        structure: A checksum of its containers, numbers and strings.
        buffers: Shape, dtype and a checksum of a sample of each tensor and array.
    """

    structure: int
    buffers: list[tuple[Sequence[int], Any, int]]

    @classmethod
    def of(cls, batch: Any, most: int = _COMPARED_BYTES) -> Parts:
        """Return those of a batch, from about so many bytes of each tensor or array."""
        buffers, structure = parts_of(batch)
        return cls(
            structure, [(one.shape, one.dtype, crc32(_sample(one, most))) for one in buffers]
        )

    @property
    def checksums(self) -> list[int]:
        """One of each part, the structure first."""
        forms = ((*shape, str(dtype), sample) for shape, dtype, sample in self.buffers)
        return [self.structure, *(crc32(repr(form).encode()) for form in forms)]


def checksum_of(parts: Parts) -> int:
    """Return one checksum of all parts of a batch."""
    return crc32(repr(parts.checksums).encode())


def has_parts(batch: Any, saved: Sequence[int]) -> bool:
    """Return whether a batch still has the parts of which checksums were saved.

    An object with a ``record_stream`` method may have computed attributes since, when it was read.
    """
    now = Parts.of(batch).checksums
    if any(has_record_stream(type(node.value)) for node in nodes_in(batch)):
        return Counter(saved[1:]) <= Counter(now[1:])
    return [*saved] == now
