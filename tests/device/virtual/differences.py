"""``first_difference`` on the virtual device: a random case serially, and under its plan.

A buffer is compared by its value. The copy that is compared is launched directly after the task, on
its stream, like that of a tensor on a GPU::

    task's stream   │ task's work │ copy │          another task's stream   │ reads the buffer │
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from swpipe import pipeline
from swpipe._engine.waiting import Host
from swpipe._values import containers
from swpipe.testing import Difference, Loop, first_difference
from tests.device.virtual import Buffer, VirtualDevice, virtual_device
from tests.device.virtual.machine import VirtualMachine
from tests.support.exploring import ExploringHost
from tests.support.strategies import Case


class ComparedBuffer(Buffer):
    """A buffer whose content is one leaf."""

    late: Late | None = None

    def content(self) -> Late:
        """The same object until the next write is submitted."""
        if self.late is None or self.late.version != self.version:
            self.late = Late(self._device, self, self.version)
        return self.late


class Late:
    """The value that a buffer has when the device comes to it; copying launches a copy."""

    same_in_replay = True

    def __init__(self, device: VirtualDevice, buffer: Buffer, version: int) -> None:
        self._device, self._buffer, self.version = device, buffer, version

    def __deepcopy__(self, memo: Any) -> Late:
        copied = self._device.launch(lambda value: value, self._buffer)
        return Late(self._device, copied, copied.version)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Late) and self.value == other.value

    __hash__ = object.__hash__

    @property
    def value(self) -> Any:
        """What came of it; the host waits."""
        return self._device.read(self._buffer)

    def __repr__(self) -> str:
        return str(self.value)


@contextmanager
def compared_buffers(device: VirtualDevice) -> Iterator[None]:
    """Buffers have values that can be compared, and pipelines the device's threads."""
    as_leaf = containers.Kind(lambda buffer: (buffer.content(),), make=lambda b, old, new: b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(containers.KINDS, ComparedBuffer, as_leaf)
        patch.setattr(virtual_device, "Buffer", ComparedBuffer)
        patch.setattr(pipeline, "Host", lambda: device.host)
        yield


def difference_on(
    case: Case, host: Host | None = None, *, batches_launched: bool = False
) -> Difference | BaseException | None:
    """What differs between the case's tasks serially and under its plan, or what they raise.

    Where ``batches_launched``, the device makes each batch, on the caller's stream.
    """
    device = VirtualDevice(case.seed, host)
    pause = host.pause if isinstance(host, ExploringHost) else lambda: None

    def launched() -> Iterator[Any]:
        for batch in case.batches:
            filled = device.launch(lambda: 0)
            device.read(filled)  # what a task reads that does not wait for the batch is a number
            yield device.launch(lambda batch=batch: batch or 0, into=filled)

    def loop(plan: Any) -> Loop:
        machine = VirtualMachine(device, case, pause)
        batches = launched() if batches_launched else case.batches
        return Loop(batches, machine.tasks(), plan=plan)

    with compared_buffers(device):
        try:
            return first_difference(lambda: loop(None), lambda: loop(case.plan), device=device)
        except Exception as error:  # noqa: BLE001 - with a guard taken away, anything may come
            return error
