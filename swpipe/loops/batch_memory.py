"""The contents of batches, as checksums: they show writes, and tell batches apart.

A tensor counts its modifications, except those through an array that shares its memory; an array
counts none. So there is a checksum, too: of a sample of all memory on the host. A write between
the sampled bytes, to memory without a counter, is not detected.
"""

from __future__ import annotations

import ctypes
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
from swpipe._values.fingerprint import same_node
from swpipe._values.stateful import PLAIN
from swpipe._values.walk import ValueNode, leaves_in, nodes_in, tensors_held

_SAMPLED = 1024
"""The approximate number of bytes that are sampled of a tensor or array; all if it has fewer."""

_OF_STRING = 256
"""The number of characters of a string that are compared."""

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
        if buffer.is_contiguous():
            return buffer.data_ptr(), buffer.nbytes, ()
        steps = [step * buffer.itemsize for step in buffer.stride()]
        return buffer.data_ptr(), buffer.nbytes, steps
    if buffer.dtype.hasobject:
        return 0, 0, ()
    address: int = buffer.__array_interface__["data"][0]
    return address, buffer.nbytes, () if buffer.flags.c_contiguous else buffer.strides


def span_of(buffer: Any) -> tuple[int, int]:
    """Return the addresses of a buffer's first byte and behind its last one; equal if none."""
    address, total, steps = _layout(buffer)
    if not steps:
        return address, address + total
    # Steps may be negative in an array (a[::-1]): its lowest address is before its first item.
    far = [(length - 1) * step for length, step in zip(buffer.shape, steps, strict=True)]
    before = sum(min(0, way) for way in far)
    behind = sum(max(0, way) for way in far)
    return address + before, address + behind + buffer.itemsize


def _sample(buffer: Any, most: int) -> bytes:
    """Return about ``most`` bytes from all over a buffer on the host; all if it has fewer."""
    address, total, steps = _layout(buffer)
    size = buffer.itemsize
    if steps:
        items = total // size
        sampled = []
        # The number of an item gives its index in each dimension.
        for number in (*range(0, items, max(1, total // most) | 1), items - 1):
            place = address
            rest = number
            for length, step in zip(reversed(buffer.shape), reversed(steps), strict=True):
                rest, index = divmod(rest, length)
                place += index * step
            sampled.append(ctypes.string_at(place, size))
        return b"".join(sampled)
    if total <= most:
        return ctypes.string_at(address, total)
    memory = memoryview((ctypes.c_ubyte * total).from_address(address))
    # An odd step visits different bytes of the items: an even one could see the same byte of each
    # item only. The first and the last item are always sampled.
    sample = memory[:: total // most | 1].tobytes()
    return b"".join((sample, memory[:size].tobytes(), memory[-size:].tobytes()))


def content_of(buffer: Any, most: int = _SAMPLED) -> Content:
    """Return the version counter and the checksum that change when a buffer is written."""
    version = 0
    if isinstance(buffer, Tensor):
        try:
            version = buffer._version
        except RuntimeError:
            # An inference tensor has no counter; is_inference() would release the interpreter lock.
            version = 0
    return version, crc32(_sample(buffer, most))


class Buffer(NamedTuple):
    """A tensor or array with its contents at some time.

    Attributes:
        reference: A weak reference: what is only compared must not keep its memory.
        shape: Its shape.
        dtype: Its data type.
        content: The version counter and checksum at that time.
        begin: The address of its first byte on the host.
        end: The address behind its last byte.
    """

    reference: weakref.ref[Any]
    shape: Sequence[int]
    dtype: Any
    content: Content
    begin: int
    end: int

    @classmethod
    def of(cls, buffer: Any, most: int = _SAMPLED) -> Buffer:
        """Return a tensor or array with its current contents."""
        content = content_of(buffer, most)
        reference = weakref.ref(buffer)
        return cls(reference, buffer.shape, buffer.dtype, content, *span_of(buffer))


class Contents:
    """The contents of a batch, or of other values, at some time.

    Args:
        batch: The batch.
        most: About how many bytes of each tensor or array are sampled.
        containers: Whether ``changed`` compares which objects the containers hold, too.
    """

    def __init__(self, batch: Any, most: int = _SAMPLED, *, containers: bool = False) -> None:
        buffers, self._structure = parts_of(batch)
        self._buffers = [Buffer.of(buffer, most) for buffer in buffers]
        self._nodes = [*nodes_in(batch)] if containers and not isinstance(batch, Tensor) else []

    @property
    def checksums(self) -> list[int]:
        """The checksums that tell the batch from others, in another process, too.

        The first one is of the structure; the others are of shape, data type and sample of each
        tensor and array.
        """
        forms = ((*b.shape, str(b.dtype), b.content[1]) for b in self._buffers)
        return [self._structure, *(crc32(repr(form).encode()) for form in forms)]

    def release(self) -> None:
        """Drop the containers, which hold the batch."""
        self._nodes = []

    @property
    def checksum(self) -> int:
        """One checksum of all parts."""
        return crc32(repr(self.checksums).encode())

    def is_used_again_by(self, later: Contents) -> bool:
        """Return whether later contents are in memory of these, which was written since.

        A buffer that is gone does not count: its memory is free for new batches.
        """
        for earlier in self._buffers:
            for other in later._buffers:
                if other.begin < earlier.end and earlier.begin < other.end:
                    buffer = earlier.reference()
                    if buffer is not None and content_of(buffer) != earlier.content:
                        return True
        return False

    def are_those_of(self, batch: Any) -> bool:
        """Return whether the batch has the same structure, numbers and contents of buffers."""
        buffers, structure = parts_of(batch)
        contents = [buffer.content for buffer in self._buffers]
        return structure == self._structure and contents == [*map(content_of, buffers)]

    def renew(self) -> None:
        """Compare with the current contents from now on."""
        buffers = [known.reference() for known in self._buffers]
        self._buffers = [Buffer.of(buffer) for buffer in buffers if buffer is not None]

    def written(self) -> list[Any]:
        """Return the tensors and arrays that were written since, and still exist."""
        pairs = [(known.content, known.reference()) for known in self._buffers]
        return [now for content, now in pairs if now is not None and content_of(now) != content]

    def changed(self) -> list[Any]:
        """Return the buffers that were written, and the containers that hold other values now."""
        now = [(node, ValueNode.of(node.value)) for node in self._nodes]
        return self.written() + [node.value for node, after in now if not same_node(node, after)]


def has_checksums(batch: Any, saved: Sequence[int]) -> bool:
    """Return whether a batch still has the parts of which checksums were saved.

    Parts may have been added to an object with a ``record_stream`` method: reading it may compute
    attributes.
    """
    now = Contents(batch).checksums
    # torchrec's KeyedJaggedTensor, for one, computes offsets from its lengths when they are read.
    if any(has_record_stream(type(node.value)) for node in nodes_in(batch)):
        return Counter(saved[1:]) <= Counter(now[1:])
    return [*saved] == now
