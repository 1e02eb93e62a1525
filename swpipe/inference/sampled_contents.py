"""Whether memory that a task reads holds other values than when it read it last.

A version counter tells of a change, but not where it is made through ``tensor.data``, which has a
counter of its own, or where ``tensor.data = other`` gives the tensor other memory. There a sample
of the content tells: a sum over up to ``_ELEMENTS`` elements, as bits. It is taken when the task
has ended, of memory that the task used in an earlier watched iteration as well. On a device it is
compared there, and the answer is read when the device has it: nothing waits.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from swpipe._values.storages import StorageId
from swpipe.device import Device, Event, on_cpu

_ELEMENTS = 4096
"""How many elements of a tensor are looked at."""

_TENSORS = 16
"""How many tensors of a task are, in one iteration; they are spread over all that it used."""

_MOST_KEPT = 4096
"""How many are added before those are dropped whose memory is gone."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element to the type that sums its bits."""


class UsedMemory(NamedTuple):
    """Memory that a task used, and did not make in that iteration.

    Attributes:
        number: Its storage's.
        name: What messages call it, if it has no better name.
        tensor: The tensor that stands for it.
        reference: To the storage: its number is not used again while this is kept.
    """

    number: StorageId
    name: str
    tensor: Tensor
    reference: Any


class ChangedMemory(NamedTuple):
    """Memory that something had changed when a task read it on an iteration."""

    iteration: int
    number: StorageId
    name: str


@dataclass(slots=True)
class _Sample:
    """What is known of some memory since the task used it last."""

    reference: Any
    tensor: weakref.ref[Tensor]
    kind: Any = None
    total: Tensor | None = None  # on the tensor's device


class SampledContents:
    """What one task has read outside its contexts; its runs follow each other."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[tuple[str, int], _Sample] = {}
        # The answers are there when the event is done; None, if they are on the host.
        self._under_way: deque[tuple[Event | None, dict[ChangedMemory, Tensor]]] = deque()
        self._most = _MOST_KEPT

    def compare(self, iteration: int, used: Iterable[UsedMemory]) -> None:
        """Compare what the task used in an iteration, which has just ended."""
        known = [(one, before) for one in used if (before := self._before(one)) is not None]
        differs: dict[ChangedMemory, Tensor] = {}
        with torch.no_grad(), torch._C._DisableTorchDispatch():  # no operators for others to count
            for one, before in known[:: -(len(known) // _TENSORS + 1)]:
                now = self._note(one)
                now.kind, now.total = _sampled(one.tensor)
                if now.total is not None and before.total is not None and now.kind == before.kind:
                    flag = now.total != before.total
                    differs[ChangedMemory(iteration, one.number, one.name)] = flag
            if differs:
                self._send(differs)
        if len(self._known) > self._most:
            alive = {k: one for k, one in self._known.items() if not one.reference.expired()}
            self._known, self._most = alive, 2 * len(alive) + _MOST_KEPT

    def changed(self) -> Iterator[ChangedMemory]:
        """What had been changed, as far as it is known by now."""
        while self._under_way:
            done, differs = self._under_way[0]
            if done is not None and not done.query():
                return
            self._under_way.popleft()
            with torch._C._DisableTorchDispatch():
                found = [one for one, flag in differs.items() if flag]
            yield from found

    def _send(self, differs: dict[ChangedMemory, Tensor]) -> None:
        """Copy the answers to the host."""
        done = None
        if not all(map(on_cpu, differs.values())):
            differs = {one: flag.to("cpu", non_blocking=True) for one, flag in differs.items()}
            done = self._device.new_event()
            done.record(self._device.current_stream())
        self._under_way.append((done, differs))

    def _before(self, used: UsedMemory) -> _Sample | None:
        """What is known of the memory, or of the tensor; None and a note if it is new."""
        if (known := self._known.get(("memory", used.number))) is not None:
            return known
        known = self._known.get(("tensor", id(used.tensor)))
        if known is not None and known.tensor() is used.tensor:
            return known
        self._note(used)
        return None

    def _note(self, used: UsedMemory) -> _Sample:
        now = _Sample(used.reference, weakref.ref(used.tensor))
        self._known["memory", used.number] = self._known["tensor", id(used.tensor)] = now
        return now


def _sampled(tensor: Tensor) -> tuple[Any, Tensor | None]:
    """What must be equal for a comparison to mean something, and the sum; None if there is none."""
    count, size = tensor.numel(), tensor.element_size()
    kind = tensor.device, tensor.dtype, tensor.shape, tensor.storage_offset()
    known = type(tensor) in (Tensor, Parameter) and size in _WORDS
    if not known or tensor.dtype.is_complex or tensor.is_quantized:
        return kind, None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    dense = 1 + sum((n - 1) * step for n, step in steps) == count
    end = (tensor.storage_offset() + count) * size
    if not dense or tensor.untyped_storage().nbytes() < end:  # a sharded one may have let it go
        return kind, None
    step = (count // _ELEMENTS) | 1
    chosen = tensor.as_strided((-(-count // step),), (step,), tensor.storage_offset())
    return kind, chosen.view(_WORDS[size]).sum()
