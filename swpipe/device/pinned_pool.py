"""Copies from pageable memory to a device, through pinned buffers that are used again.

    host          write A   write B              write A: (1)
    copy stream        [ A to the device ][ B ... ]   [ A ...
                                        ^ A's event

Guarantees
    - A buffer is written only when the copies that read it have ended (1): the event that was
      recorded after them has been reached. Until then a new batch gets another buffer; if there are
      as many as allowed, the host waits for the oldest one. After a failure, too (2).
    - Pipelines on several threads may use one pool; each may add a buffer.
    - The device's tensors have the values and strides that ``Tensor.to`` gives.

Assumptions
    - What is copied is not modified while ``copy`` runs. Afterwards it may be.
    - When the pool is dropped, torch's allocator of pinned memory keeps what a copy still reads.
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
"""Bytes; of tensors within a buffer."""

_PAUSE_S = 50e-6


class Transfer(NamedTuple):
    """A tensor on the host, and the one on the device that gets its values."""

    source: Tensor
    target: Tensor


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Pinned memory; no tuple, in which the search for tasks' state would find it.

    Attributes:
        memory: The bytes.
        copied: Recorded after the copies that read it.
    """

    memory: Tensor
    copied: Event


class PinnedPool:
    """The buffers of one loop; each holds the tensors of one batch.

    Args:
        device: Where the copies go, and whose current stream runs them.
        most: How many buffers there may be.
    """

    def __init__(self, device: Device, most: int) -> None:
        self._device, self._most = device, most
        self._used: deque[_Buffer] = deque()  # the oldest first

    def copy(self, transfers: Iterable[Transfer]) -> None:
        """Copy on the current stream; returns when the sources have been read."""
        starts: list[tuple[int, Transfer]] = []
        size = 0
        for one in transfers:
            starts.append((size, one))
            size += -(-one.source.nbytes // _ALIGNMENT) * _ALIGNMENT
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
        """A buffer that no copy reads, of so many bytes or more."""
        try:
            oldest = self._used.popleft()
        except IndexError:  # the first batch, or another pipeline has it
            return self._new_buffer(size)
        if len(self._used) + 1 < self._most and not self._is_free(oldest):
            self._used.appendleft(oldest)
            return self._new_buffer(size)
        while not self._is_free(oldest):
            time.sleep(_PAUSE_S)
        return oldest if oldest.memory.numel() >= size else self._new_buffer(size)

    def _new_buffer(self, size: int) -> _Buffer:
        step = 1 << max(0, size.bit_length() - 3)  # up to a quarter more: batches differ in size
        size = -(-size // step) * step
        memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return _Buffer(memory, self._device.new_event())

    def _is_free(self, buffer: _Buffer) -> bool:
        return buffer.copied.query()  # (1)
