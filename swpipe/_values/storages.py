"""Identities, sizes and contents of tensor storages.

A storage is the memory that a tensor and its views share. A weak reference keeps its identity: the
reference does not keep the memory alive, but prevents the storage's number from being used again.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import _has_storage as has_storage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from swpipe._values.fingerprint import version_of
from swpipe._values.walk import parts_of
from swpipe.device import on_cpu

StorageId = int

MAX_CHECKED_BYTES = 2**20
"""The largest storage of which a checksum is computed; the version counter is always compared."""


class Storages:
    """The storages seen by one observer."""

    def __init__(self) -> None:
        self._references: dict[StorageId, StorageWeakRef] = {}
        self._descriptions: dict[StorageId, str] = {}

    def add(self, tensor: Tensor) -> Iterator[tuple[StorageId, bool]]:
        """Yield each storage of a tensor, and whether the storage is seen for the first time.

        Usually there is one storage; sparse tensors and wrappers have several or none.
        """
        for part in _parts(tensor):
            storage = part.untyped_storage()
            # The address of torch's StorageImpl; _cdata is private in torch 2.13.
            number = storage._cdata
            new = number not in self._references
            if new:
                self._references[number] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._descriptions[number] = described(part)
            yield number, new

    def of(self, tensor: Tensor) -> frozenset[StorageId]:
        """Return the storages of a tensor."""
        return frozenset(number for number, _ in self.add(tensor))

    def known(self) -> frozenset[StorageId]:
        """Return all storages seen so far."""
        return frozenset(self._references)

    def alive(self, number: StorageId) -> bool:
        """Return whether the storage still exists."""
        return not self._references[number].expired()  # type: ignore[no-untyped-call]

    def reference(self, number: StorageId) -> StorageWeakRef:
        """Return a storage's weak reference.

        While it is kept, the number is not used again; its ``expired()`` tells whether the storage
        is gone.
        """
        return self._references[number]

    def description(self, number: StorageId) -> str:
        """Return data type and shape of the storage's first tensor, such as "float32 [3, 4]"."""
        return self._descriptions[number]


class MemoryPrint:
    """The versions and contents of the memory of some tensors, at one moment."""

    def __init__(self, tensors: Iterable[Tensor], storages: Storages) -> None:
        self._tensors = [(tensor, storages.of(tensor), version_of(tensor)) for tensor in tensors]
        self._sums: dict[StorageId, int] = {}
        for tensor, numbers, _ in self._tensors:
            # Views share a storage, whose checksum is computed once.
            self._sums |= checksums(tensor) if numbers - self._sums.keys() else {}

    def changed_until(self, now: MemoryPrint) -> set[StorageId]:
        """Return the storages with another version or content at a later moment."""
        # A tensor that the later moment no longer reaches is read again: it may have been changed
        # before.
        sums = dict(now._sums)
        changed = set[StorageId]()
        for tensor, numbers, version in self._tensors:
            sums |= checksums(tensor) if numbers - sums.keys() else {}
            if version_of(tensor) != version:
                changed |= numbers
        return changed | {n for n, content in self._sums.items() if sums.get(n, content) != content}


def described(tensor: Tensor) -> str:
    """Return data type and shape: "float32 [3, 4]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors with a storage that a tensor consists of."""
    if is_lazy(tensor):
        return []
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided  # nearly all tensors are
    return [part for part in ((tensor,) if plain else parts_of(tensor)) if has_storage(part)]


_PLAIN = (Tensor, torch.nn.Parameter)


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a strided tensor in its storage, and the byte after its last."""
    size = tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = sum((n - 1) * int(step) for n, step in steps)
    first = int(tensor.storage_offset()) * size
    return first, first + (extent + 1) * size


def nbytes(tensor: Tensor) -> dict[StorageId, int]:
    """Return the bytes of each storage of a tensor."""
    storages = (part.untyped_storage() for part in _parts(tensor))
    return {storage._cdata: storage.nbytes() for storage in storages}


def checksums(tensor: Tensor) -> dict[StorageId, int]:
    """Return a checksum over all bytes of each storage up to ``MAX_CHECKED_BYTES``."""
    storages = (part.untyped_storage() for part in _parts(tensor) if not part.is_meta)
    return {s._cdata: _checksum(s) for s in storages if 0 < s.nbytes() <= MAX_CHECKED_BYTES}


def _checksum(storage: Any) -> int:
    """Return a checksum over all bytes of a storage."""
    # Memory on the host is read in place: neither a copy nor a numpy array is made.
    there = storage if on_cpu(storage) else storage.cpu()
    return zlib.crc32((ctypes.c_ubyte * there.nbytes()).from_address(there.data_ptr()))
