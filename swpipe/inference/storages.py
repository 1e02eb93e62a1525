"""Storages: the memory that tensors share, told apart even when it is gone.

A tensor is a view of a storage; what happens to one view happens to all. A storage's identity is
kept by a weak reference, which holds no memory, yet keeps its number from being given to another.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from swpipe._tensors.pytree import parts_of
from swpipe.device import on_cpu

StorageId = int

MAX_CHECKED_BYTES = 2**30
"""Of a storage that is larger the content is not looked at; its version counter still is."""


class Storages:
    """All storages met while recording."""

    def __init__(self) -> None:
        self._met: dict[StorageId, StorageWeakRef] = {}
        self._looks: dict[StorageId, str] = {}

    def meet(self, tensor: Tensor) -> Iterator[tuple[StorageId, bool]]:
        """The storages of a tensor, each with whether it is met for the first time.

        There is one as a rule; more for sparse tensors and wrappers, or none.
        """
        for part in parts_of(tensor):
            if torch._C._has_storage(part):
                storage = part.untyped_storage()
                number = storage._cdata
                new = number not in self._met
                if new:
                    self._met[number] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    kind = str(part.dtype).removeprefix("torch.")
                    self._looks[number] = f"{kind} {list(part.shape)}"
                yield number, new

    def of(self, tensor: Tensor) -> Iterator[StorageId]:
        """The storages of a tensor."""
        return (number for number, _ in self.meet(tensor))

    def alive(self, number: StorageId) -> bool:
        """Whether anybody still holds a storage."""
        return not self._met[number].expired()  # type: ignore[no-untyped-call]

    def looks(self, number: StorageId) -> str:
        """Data type and shape of the tensor by which a storage was met: "float32 [3, 4]"."""
        return self._looks[number]


def unsharded(tensor: Any) -> Iterator[Tensor]:
    """A tensor itself, or what this rank holds of a ShardedTensor, which is no tensor to torch."""
    if hasattr(tensor, "local_shards"):
        yield from (shard.tensor for shard in tensor.local_shards())
    else:
        yield tensor


def nbytes(tensor: Tensor) -> dict[StorageId, int]:
    """Bytes of each storage of a tensor."""
    storages = (part.untyped_storage() for part in parts_of(tensor) if torch._C._has_storage(part))
    return {storage._cdata: storage.nbytes() for storage in storages}


def checksums(tensor: Tensor) -> dict[StorageId, int]:
    """A checksum over all bytes of each storage of a tensor that is not too large."""
    sums = {}
    for part in parts_of(tensor):
        if part.is_meta or not torch._C._has_storage(part):
            continue
        storage = part.untyped_storage()
        if 0 < storage.nbytes() <= MAX_CHECKED_BYTES:
            sums[storage._cdata] = _checksum(storage)
    return sums


def _checksum(storage: Any) -> int:
    size = storage.nbytes()
    if on_cpu(storage):
        return zlib.crc32((ctypes.c_ubyte * size).from_address(storage.data_ptr()))
    with torch.no_grad():
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        words = size // 8 * 8
        # Words times odd numbers that differ: an order of the same words gives another sum.
        long = content[:words].view(torch.int64)
        factors = torch.arange(1, 2 * len(long), 2, device=storage.device)
        return int((long * factors).sum()) + int(content[words:].sum())
