"""The memory of batches: what shows that somebody has written it, and what tells batches apart.

A tensor counts its modifications, but for those through an array that shares its memory; an array
counts none. So there is a checksum, too: of a sample of all that is on the host, from its whole
memory. A write between the bytes of the sample, to memory without a counter, is not seen.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice, repeat
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from swpipe._values.containers import has_record_stream
from swpipe._values.stateful import PLAIN
from swpipe._values.walk import leaves_in, nodes_in, tensors_held

_COMPARED_BYTES = 1024
"""About so many show that a tensor or array was written; all of them if there are fewer."""

_SAMPLED_BYTES = 256
"""About so many of a tensor or array tell a batch from others."""

_MOST_LEAVES = 256
"""So many numbers, strings, arrays and other objects of a batch are looked at."""

Content = tuple[int, int]
"""A version counter, and a checksum."""


def memory_parts(batch: Any) -> tuple[list[Any], list[Any]]:
    """A batch's tensors and arrays of numpy; and its other numbers, strings and objects."""
    if _is_flat(batch):
        return [*batch] if type(batch) in (tuple, list) else [batch], []
    leaves = [*islice(leaves_in(batch), _MOST_LEAVES)]
    arrays = getattr(sys.modules.get("numpy"), "ndarray", ())
    buffers = [one for one in leaves if isinstance(one, arrays)]
    return [*tensors_held(batch), *buffers], [one for one in leaves if not isinstance(one, arrays)]


def _is_flat(batch: Any) -> bool:
    """Return whether there is nothing to search: it is a tensor, or a list or tuple of tensors."""
    several = batch if type(batch) in (tuple, list) else (batch,)
    return all(type(one) is Tensor for one in several)


def _layout(buffer: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Address, 0 where none is on the host; shape; steps in bytes; bytes of an item."""
    if isinstance(buffer, Tensor):
        there = buffer.layout is torch.strided and buffer.is_cpu
        size = buffer.element_size()
        steps = tuple(step * size for step in buffer.stride()) if there else ()
        return buffer.data_ptr() if there else 0, tuple(buffer.shape), steps, size
    there = buffer.size and not buffer.dtype.hasobject
    address = buffer.__array_interface__["data"][0] if there else 0
    return address, buffer.shape, buffer.strides, buffer.itemsize


def _is_whole(shape: tuple[int, ...], steps: tuple[int, ...], size: int) -> bool:
    """Whether the items lie in one piece, in their order."""
    for length, step in zip(reversed(shape), reversed(steps), strict=True):
        if length != 1 and step != size:
            return False
        size *= length
    return True


def span_of(buffer: Any) -> tuple[int, int]:
    """The addresses of its first byte, and of the first one behind it; the same for none."""
    address, shape, steps, size = _layout(buffer)
    if not address or 0 in shape:
        return 0, 0
    if _is_whole(shape, steps, size):
        return address, address + math.prod(shape) * size
    far = [(length - 1) * step for length, step in zip(shape, steps, strict=True)]
    return address + sum(min(0, one) for one in far), address + sum(map(max, far, repeat(0))) + size


def _sample(buffer: Any, most: int) -> bytes:
    """About so many bytes of what is on the host, from all over it; all if there are fewer."""
    address, shape, steps, size = _layout(buffer)
    items = math.prod(shape)
    if not address or not items:
        return b""
    if _is_whole(shape, steps, size):
        if items * size <= most:
            return ctypes.string_at(address, items * size)
        memory = memoryview((ctypes.c_ubyte * (items * size)).from_address(address))
        sample = memory[:: max(1, items * size // most) | 1].tobytes()
        return b"".join((sample, memory[:size].tobytes(), memory[-size:].tobytes()))
    found = []
    for number in (*range(0, items, max(1, items * size // most) | 1), items - 1):
        place = address
        rest = number
        for length, step in zip(reversed(shape), reversed(steps), strict=True):
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


def structure_of(batch: Any, leaves: list[Any]) -> int:
    """Return a checksum of all but the tensors and arrays: containers, numbers and strings.

    Args:
        batch: The batch.
        leaves: What ``memory_parts`` returns besides tensors and arrays.
    """
    if not leaves and _is_flat(batch):
        return 0
    nodes = [*islice(nodes_in(batch), _MOST_LEAVES)]
    keys = islice(chain.from_iterable(node.keys for node in nodes), _MOST_LEAVES)
    plain = [
        one[:_SAMPLED_BYTES] if isinstance(one, str | bytes) else one
        for one in (*leaves, *keys)
        if isinstance(one, PLAIN)
    ]
    return crc32(repr(([len(node.children) for node in nodes], plain)).encode())


def checksum_of(batch: Any, most: int = _SAMPLED_BYTES) -> int:
    """Return a checksum of a sample of its bytes on the host, of shapes, numbers and strings.

    It includes the length and the keys of each container, and tells a batch from others in another
    process, too.

    Args:
        batch: The batch.
        most: About so many bytes of each tensor or array.
    """
    return crc32(repr(part_checksums(batch, most)).encode())


def part_checksums(batch: Any, most: int = _SAMPLED_BYTES) -> list[int]:
    """Return the same of each part: first ``structure_of``, then each tensor and array."""
    buffers, leaves = memory_parts(batch)
    described = [(*one.shape, str(one.dtype), crc32(_sample(one, most))) for one in buffers]
    return [structure_of(batch, leaves), *(crc32(repr(one).encode()) for one in described)]


def has_parts(batch: Any, saved: Sequence[int]) -> bool:
    """Return whether a batch still has the parts of which ``part_checksums`` were saved.

    An object with a ``record_stream`` method may have computed attributes since, when it was read.
    """
    now = part_checksums(batch)
    if any(has_record_stream(type(node.value)) for node in nodes_in(batch)):
        return Counter(saved[1:]) <= Counter(now[1:])
    return [*saved] == now
