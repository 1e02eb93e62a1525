"""Copies from pageable memory to a device, through pinned buffers that are used again.

    host          write A   write B              write A: (1)
    copy stream        [ A to the device ][ B ... ]   [ A ...
                                        ^ A's event

Guarantees
    - A buffer is written only when the copies that read it have ended (1): the event that was
      recorded after them has been reached. Until then a new batch gets another buffer; if there are
      as many as allowed, the host waits for the oldest one. The same holds after a failure (2).
    - Pipelines on several threads may use one pool; each may add a buffer.
    - The device's tensors have the values and strides that ``Tensor.to`` gives.

Assumptions
    - The sources are not modified while ``copy`` runs. Afterwards they may be.
    - When the pool is dropped, torch's allocator of pinned memory keeps the buffers that a copy is
      still reading.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swpipe.device.protocol import Device, Event

_ALIGNMENT = 256
"""The alignment of tensors within a buffer, in bytes."""

_PAUSE_S = 50e-6


class Transfer(NamedTuple):
    """A tensor on the host, and the tensor on the device that gets its values."""

    source: Tensor
    target: Tensor


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Pinned memory; no tuple, which the search for tasks' state would open.

    Attributes:
        memory: The bytes.
        copied: The event recorded after the copies that read the memory.
    """

    memory: Tensor
    copied: Event


class PinnedPool:
    """The buffers of one loop; each holds the tensors of one batch.

    Args:
        device: The target of the copies, whose current stream runs them.
        most: The largest number of buffers.
    """

    def __init__(self, device: Device, most: int) -> None:
        self._device = device
        self._most = most
        self._used: deque[_Buffer] = deque()  # oldest first

    def copy(self, transfers: Iterable[Transfer]) -> None:
        """Copy on the current stream; return when the sources have been read."""
        starts: list[tuple[int, Transfer]] = []
        size = 0
        for transfer in transfers:
            starts.append((size, transfer))
            size += -(-transfer.source.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._free_buffer(size)
        try:
            for start, (source, target) in starts:
                # Views of the current mode: a buffer that inference mode made may be written later.
                place = buffer.memory[start : start + source.nbytes].view(source.dtype)
                pinned = place.as_strided(target.shape, target.stride())
                pinned.copy_(source)
                target.copy_(pinned, non_blocking=True)
        finally:  # whatever was submitted before a failure reads the buffer (2)
            buffer.copied.record(self._device.current_stream())
            self._used.append(buffer)

    def _free_buffer(self, size: int) -> _Buffer:
        """Return a buffer of ``size`` bytes or more that no copy reads."""
        try:
            oldest = self._used.popleft()
        except IndexError:  # the first batch, or another thread has all buffers
            return self._new_buffer(size)
        # Usually the oldest buffer is free first, since its copies were submitted first.
        if len(self._used) + 1 < self._most and not self._is_free(oldest):
            self._used.appendleft(oldest)
            return self._new_buffer(size)
        while not self._is_free(oldest):
            time.sleep(_PAUSE_S)
        return oldest if oldest.memory.numel() >= size else self._new_buffer(size)

    def _new_buffer(self, size: int) -> _Buffer:
        """Return a new buffer of ``size`` bytes or up to a quarter more."""
        step = 1 << max(0, size.bit_length() - 3)  # up to a quarter more: batches differ in size
        size = -(-size // step) * step
        memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return _Buffer(memory, self._device.new_event())

    def _is_free(self, buffer: _Buffer) -> bool:
        """Return whether all copies that read a buffer have ended."""
        return buffer.copied.query()  # (1)
