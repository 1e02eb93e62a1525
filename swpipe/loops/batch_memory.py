"""The memory of batches: what shows that somebody has written it, and what tells batches apart.

A tensor counts its modifications, but for those through an array that shares its memory; an array
counts none. So there is a checksum, too: of the first and the last bytes, of all that is on the
host. A write between them, to memory without a counter, is not seen.
"""

from __future__ import annotations

import ctypes
import sys
from itertools import islice
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

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


def memory_parts(batch: Any) -> tuple[list[Any], list[Any]]:
    """A batch's tensors and arrays of numpy; and its other numbers, strings and objects."""
    several = batch if type(batch) in (tuple, list) else (batch,)
    if all(type(one) is Tensor for one in several):  # as most are: there is nothing to search
        return [*several], []
    leaves = [*islice(leaves_in(batch), _MOST_LEAVES)]
    arrays = getattr(sys.modules.get("numpy"), "ndarray", ())
    buffers = [one for one in leaves if isinstance(one, arrays)]
    return [*tensors_held(batch), *buffers], [one for one in leaves if not isinstance(one, arrays)]


def place_of(buffer: Any) -> tuple[int, int]:
    """Where its memory begins, 0 if nowhere; and its bytes, 0 if not in one piece on the host."""
    if isinstance(buffer, Tensor):
        address = buffer.data_ptr() if buffer.layout is torch.strided else 0
        whole = address and buffer.is_cpu and buffer.is_contiguous()
    else:
        address = buffer.__array_interface__["data"][0] if buffer.size else 0
        whole = buffer.flags.c_contiguous and not buffer.dtype.hasobject
    return address, buffer.nbytes if whole else 0


def content_of(buffer: Any) -> Content:
    """What tells that a tensor or array was written."""
    version = 0
    if isinstance(buffer, Tensor):
        try:
            version = buffer._version
        except RuntimeError:  # an inference tensor; is_inference() lets go of the interpreter lock
            version = 0
    address, size = place_of(buffer)
    if not size:
        return version, 0
    first = crc32(ctypes.string_at(address, min(size, _CHECKED_BYTES)))
    rest = min(size - _CHECKED_BYTES, _CHECKED_BYTES)
    last = crc32(ctypes.string_at(address + size - rest, rest), first) if rest > 0 else first
    return version, last


def checksum_of(batch: Any) -> int:
    """Of a sample of its bytes on the host, of shapes, numbers and strings.

    It tells a batch from others in another process, too.
    """
    buffers, leaves = memory_parts(batch)
    found: list[Any] = [
        one[:_CHECKED_BYTES] if isinstance(one, str | bytes) else one
        for one in leaves
        if isinstance(one, PLAIN)
    ]
    for one in buffers:
        found += [*one.shape, str(one.dtype)]
        address, size = place_of(one)
        if size:
            memory = memoryview((ctypes.c_ubyte * size).from_address(address))
            found.append(crc32(memory[:: size // _SAMPLED_BYTES | 1].tobytes()))
    return crc32(repr(found).encode())
