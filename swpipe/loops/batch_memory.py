"""The contents of batches, as samples: they show writes, and tell batches apart.

A tensor counts its modifications, except those through an array that shares its memory; an array
counts none. So there is a sample of all memory on the host, too. A write between the sampled
places, to memory without a counter, is not detected.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, product
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from swpipe._values.fingerprint import same_node
from swpipe._values.stateful import PLAIN
from swpipe._values.walk import ValueNode, leaves_in, nodes_in, tensors_held

_SAMPLED = 128
"""The approximate number of places at which a tensor or array is sampled. Each place is a cache
miss, about 40 ns, because the batch was written on another core or is larger than the cache."""

_WORD = 8
"""The number of bytes that are sampled at each place."""

_WORDS = ctypes.c_uint64 * (1 << 59)
_BYTES = ctypes.c_ubyte * (1 << 62)
"""The memory from an address on, whatever its size; these two types are made once."""

_OF_STRING = 256
"""The number of characters of a string that are compared."""

_MOST_LEAVES = 256
"""The maximum number of numbers, strings, arrays and other objects of a batch that are compared."""


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
        value[:_OF_STRING] if isinstance(value, str | bytes) else value
        for value in (*leaves, *keys)
        if isinstance(value, PLAIN)
    ]
    shape = [len(node.children) for node in nodes]
    return buffers, crc32(repr((shape, plain)).encode())


def _layout(buffer: Any) -> tuple[int, int, Sequence[int]]:
    """Return the address of a buffer, its bytes, and the steps between items in each dimension.

    There are no steps if the memory is contiguous. Of what is not on the host, all is 0.
    """
    if isinstance(buffer, Tensor):
        if buffer.layout is not torch.strided or not buffer.is_cpu:
            return 0, 0, ()
        size = buffer.itemsize
        steps = () if buffer.is_contiguous() else [step * size for step in buffer.stride()]
        return buffer.data_ptr(), buffer.nbytes, steps
    if buffer.dtype.hasobject:
        return 0, 0, ()
    return _address(buffer), buffer.nbytes, () if buffer.flags.c_contiguous else buffer.strides


def _address(buffer: Any) -> int:
    is_tensor = isinstance(buffer, Tensor)
    return int(buffer.data_ptr() if is_tensor else buffer.__array_interface__["data"][0])


def _span(buffer: Any, address: int, steps: Sequence[int]) -> tuple[int, int]:
    """Return the addresses of a buffer's first byte and behind its last one."""
    # Steps may be negative in an array (a[::-1]): its lowest address is before its first item.
    far = [(length - 1) * step for length, step in zip(buffer.shape, steps, strict=True)]
    before = sum(min(0, way) for way in far)
    behind = sum(max(0, way) for way in far)
    return address + before, address + behind + buffer.itemsize


def _view(address: int, total: int, places: int) -> memoryview:
    """Return a view of about so many words all over contiguous memory; of all if it is small."""
    if total <= places * _WORD:
        return memoryview(_BYTES.from_address(address))[:total]
    count = total // _WORD
    # An odd step visits different columns of rows: an even one could see the same one of each row.
    return memoryview(_WORDS.from_address(address))[: count : count // places | 1]


def _items(buffer: Any, address: int, steps: Sequence[int], places: int) -> Iterator[bytes]:
    """Yield about so many items of a buffer whose memory is not contiguous."""
    items = buffer.nbytes // buffer.itemsize
    # The number of an item gives its index in each dimension.
    for number in range(0, items, items // places | 1):
        place = address
        rest = number
        for length, step in zip(reversed(buffer.shape), reversed(steps), strict=True):
            rest, index = divmod(rest, length)
            place += index * step
        yield ctypes.string_at(place, buffer.itemsize)


def _version_of(buffer: Any) -> int:
    """Return the version counter of a tensor; 0 for an array."""
    try:
        return buffer._version if isinstance(buffer, Tensor) else 0
    except RuntimeError:
        # An inference tensor has no counter; is_inference() would release the interpreter lock.
        return 0


class Buffer(NamedTuple):
    """A tensor or array with its contents at some time.

    Attributes:
        reference: A weak reference: what is only compared must not keep its memory.
        shape: Its shape.
        dtype: Its data type.
        version: Its version counter at that time; 0 for an array.
        sample: A sample of its memory at that time.
        begin: The address of its first byte on the host.
        end: The address behind its last byte.
        view: A view of the sampled memory, which may be read while the buffer has this memory; None
            if the memory is not contiguous, or not on the host.
    """

    reference: weakref.ref[Any]
    shape: Sequence[int]
    dtype: Any
    version: int
    sample: bytes
    begin: int
    end: int
    view: memoryview | None

    @classmethod
    def of(cls, buffer: Any, places: int = _SAMPLED) -> Buffer:
        """Return a tensor or array with its current contents."""
        begin, total, steps = _layout(buffer)
        end = begin + total
        view = _view(begin, total, places) if total and not steps else None
        sample = b"" if view is None else view.tobytes()
        if steps:
            sample = b"".join(_items(buffer, begin, steps, places))
            begin, end = _span(buffer, begin, steps)
        reference = weakref.ref(buffer)
        version = _version_of(buffer)
        return cls(reference, buffer.shape, buffer.dtype, version, sample, begin, end, view)

    def is_as(self, buffer: Any) -> bool:
        """Return whether a tensor or array has the contents of this one at that time."""
        if _version_of(buffer) != self.version:
            return False
        is_same = self.reference() is buffer
        # The buffer may have other memory by now, as after tensor.data = other.
        if self.view is not None and is_same:
            is_there = _address(buffer) == self.begin and buffer.nbytes == self.end - self.begin
            return is_there and self.view.tobytes() == self.sample
        return Buffer.of(buffer).sample == self.sample

    def written(self) -> Any:
        """Return the tensor or array if it was written since, and still exists; else None."""
        buffer = self.reference()
        return None if buffer is None or self.is_as(buffer) else buffer


def are_written(buffers: Iterable[Buffer]) -> bool:
    """Return whether one of the tensors and arrays was written since, and still exists."""
    return any(buffer.written() is not None for buffer in buffers)


class Contents:
    """The contents of a batch, or of other values, at some time.

    Args:
        batch: The batch.
        places: At about how many places each tensor or array is sampled.
        containers: Whether ``changed`` compares which objects the containers hold, too.
    """

    def __init__(self, batch: Any, places: int = _SAMPLED, *, containers: bool = False) -> None:
        buffers, self._structure = parts_of(batch)
        self._buffers = [Buffer.of(buffer, places) for buffer in buffers]
        self._nodes = [*nodes_in(batch)] if containers and not isinstance(batch, Tensor) else []

    @property
    def checksum(self) -> int:
        """A checksum that tells the batch from others, in another process, too.

        It is of the structure, and of shape, data type and sample of each tensor and array.
        """
        forms = [(*b.shape, str(b.dtype), crc32(b.sample)) for b in self._buffers]
        return crc32(repr((self._structure, forms)).encode())

    def release(self) -> None:
        """Drop the containers, which hold the batch."""
        self._nodes = []

    def is_used_again_by(self, later: Contents) -> bool:
        """Return whether later contents are in memory of these, which was written since.

        A buffer that is gone does not count: its memory is free for new batches.
        """
        pairs = product(self._buffers, later._buffers)
        again = [old for old, new in pairs if new.begin < old.end and old.begin < new.end]
        return are_written(again)

    def are_those_of(self, batch: Any) -> bool:
        """Return whether the batch has the same structure, numbers and contents of buffers."""
        buffers, structure = parts_of(batch)
        if structure != self._structure or len(buffers) != len(self._buffers):
            return False
        return all(map(Buffer.is_as, self._buffers, buffers))

    def written(self) -> list[Any]:
        """Return the tensors and arrays that were written since, and still exist."""
        return [part for known in self._buffers if (part := known.written()) is not None]

    def changed(self) -> list[Any]:
        """Return the buffers that were written, and the containers that hold other values now."""
        now = [(node, ValueNode.of(node.value)) for node in self._nodes]
        return self.written() + [node.value for node, after in now if not same_node(node, after)]
