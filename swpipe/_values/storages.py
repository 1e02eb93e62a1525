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
    """The storages seen by one observer.

    Attributes:
        created: Storages that an operator made.
    """

    def __init__(self) -> None:
        self.created: set[StorageId] = set()
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

    def changed_until(self, now: MemoryPrint) -> tuple[set[StorageId], set[StorageId]]:
        """Return the storages with another version or content at a later moment.

        The second set has those of them without another version.
        """
        # A tensor that the later moment no longer reaches is read again: it may have been changed
        # before.
        sums = dict(now._sums)
        versions = set[StorageId]()
        for tensor, numbers, version in self._tensors:
            sums |= checksums(tensor) if numbers - sums.keys() else {}
            if version_of(tensor) != version:
                versions |= numbers
        contents = {number for number, sum_ in self._sums.items() if sums.get(number, sum_) != sum_}
        return contents | versions, contents - versions


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


def nbytes(tensor: Tensor) -> dict[StorageId, int]:
    """Return the bytes of each storage of a tensor."""
    storages = (part.untyped_storage() for part in _parts(tensor))
    return {storage._cdata: storage.nbytes() for storage in storages}


def checksums(tensor: Tensor) -> dict[StorageId, int]:
    """Return a checksum over all bytes of each storage up to ``MAX_CHECKED_BYTES``."""
    storages = (part.untyped_storage() for part in _parts(tensor) if not part.is_meta)
    return {s._cdata: _checksum(s) for s in storages if 0 < s.nbytes() <= MAX_CHECKED_BYTES}


def _checksum(storage: Any) -> int:
    """Return a checksum over all bytes of a storage, computed on its device."""
    size = storage.nbytes()
    if on_cpu(storage):
        # Reads the memory in place: neither a copy nor a numpy array is made.
        return zlib.crc32((ctypes.c_ubyte * size).from_address(storage.data_ptr()))
    with torch.no_grad():
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        end = size // 8 * 8
        words = content[:end].view(torch.int64)
        last = content.new_zeros(8)
        last[: size - end] = content[end:]
        # Each word has its own odd factor, so that the sum depends on the order of the words.
        factors = 2 * torch.arange(len(words) + 1, device=storage.device) + 1
        return int((words * factors[:-1]).sum() + (last.view(torch.int64) * factors[-1:]).sum())
