"""Detection of changed values in memory that a task has read before.

A version counter shows a change, except for a change through ``tensor.data``, which has a counter
of its own, and for ``tensor.data = other``, which gives the tensor other memory. These changes show
in a sample of the content: a sum over up to ``_ELEMENTS`` elements, as bits. The sample is taken
when the task has ended, of memory that the task also used in an earlier watched iteration. The
samples of tensors on a device are compared on the device, and the result is read when it has
arrived on the host: nothing waits for it.
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

from swpipe._values.storages import StorageId, span_of
from swpipe.device import Device, Event
from swpipe.inference.pruned_dict import PrunedDict

_ELEMENTS = 4096
"""The maximum number of elements that are sampled of one tensor."""

_TENSORS = 16
"""The number of tensors sampled of a task in one iteration, spread over all that it used."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes per element to the type in which its bits are summed."""


class UsedMemory(NamedTuple):
    """Memory that a task used, and did not make in that iteration.

    Attributes:
        number: The number of its storage.
        name: The name for messages, if there is no better one.
        tensor: The tensor that stands for the memory.
        reference: A reference to the storage: the number is not used again while it is kept.
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
    """The last sample of some memory that the task used."""

    reference: Any
    tensor: weakref.ref[Tensor]
    kind: Any = None
    total: Tensor | None = None  # on the tensor's device


class SampledContents:
    """The samples of what one task has read outside its contexts; runs follow each other."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known = PrunedDict[tuple[str, int], _Sample]()
        # The results have arrived on the host when the event is done.
        self._under_way: deque[tuple[Event, dict[ChangedMemory, Tensor]]] = deque()

    def compare(self, iteration: int, used: Iterable[UsedMemory]) -> None:
        """Compare the memory that the task used in an iteration, which has just ended."""
        known = [
            (memory, before) for memory in used if (before := self._before(memory)) is not None
        ]
        differs: dict[ChangedMemory, Tensor] = {}
        with torch.no_grad(), torch._C._DisableTorchDispatch():  # not recorded by modes
            # The stride spreads the sampled tensors evenly. Private in torch 2.13:
            # _DisableTorchDispatch.
            for memory, before in known[:: -(len(known) // _TENSORS + 1)]:
                now = self._note(memory)
                now.kind, now.total = _sampled(memory.tensor)
                if now.total is not None and before.total is not None and now.kind == before.kind:
                    flag = (now.total != before.total).to("cpu", non_blocking=True)
                    differs[ChangedMemory(iteration, memory.number, memory.name)] = flag
            if differs:
                done = self._device.new_event()
                done.record(self._device.current_stream())
                self._under_way.append((done, differs))
        self._known.prune(lambda sample: bool(sample.reference.expired()))

    def changed(self) -> Iterator[ChangedMemory]:
        """Yield the changes whose comparisons have arrived on the host by now."""
        # In the order of iterations: a later comparison is not read before an earlier one.
        while self._under_way and self._under_way[0][0].query():
            _, differs = self._under_way.popleft()
            with torch._C._DisableTorchDispatch():
                changed = [memory for memory, flag in differs.items() if flag]
            yield from changed

    def _before(self, used: UsedMemory) -> _Sample | None:
        """Return the last sample of the memory, or else of the tensor.

        If there is none, a new sample is noted, and None is returned.
        """
        if (known := self._known.get(("memory", used.number))) is not None:
            return known
        known = self._known.get(("tensor", id(used.tensor)))
        if known is not None and known.tensor() is used.tensor:
            return known
        self._note(used)
        return None

    def _note(self, used: UsedMemory) -> _Sample:
        """Store a new, empty sample under the memory's number and the tensor's id."""
        now = _Sample(used.reference, weakref.ref(used.tensor))
        self._known["memory", used.number] = self._known["tensor", id(used.tensor)] = now
        return now


def _sampled(tensor: Tensor) -> tuple[Any, Tensor | None]:
    """Return the properties that have to match for a comparison, and the sum.

    The sum is None if the tensor cannot be sampled.
    """
    count = tensor.numel()
    size = tensor.element_size()
    kind = tensor.device, tensor.dtype, tensor.shape, tensor.storage_offset()
    known = type(tensor) in (Tensor, Parameter) and size in _WORDS
    if not known or tensor.dtype.is_complex or tensor.is_quantized:
        return kind, None
    first, end = span_of(tensor)
    # Elements with gaps between them are left out, and memory that sharding has freed.
    if end - first != count * size or tensor.untyped_storage().nbytes() < end:
        return kind, None
    # An odd step does not stay in the same columns of a matrix whose row length is a power of 2.
    step = (count // _ELEMENTS) | 1
    chosen = tensor.as_strided((-(-count // step),), (step,), tensor.storage_offset())
    return kind, chosen.view(_WORDS[size]).sum()
