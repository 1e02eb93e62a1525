"""CUDA, or another accelerator that torch supports."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from swpipe._values.walk import device_storages, record_stream, tensors_held
from swpipe.core.plan import StreamSpec
from swpipe.device.cpu import CpuDevice
from swpipe.device.protocol import Event, GeneratorStates, Stream

# Called before every task: torch.accelerator's functions call these, and take twice as long. They
# are private in torch 2.13.
_current_device_index = torch._C._accelerator_getDeviceIndex
_current_stream = torch._C._accelerator_getStream
_set_stream = torch.accelerator.set_stream

# Private in torch 2.13: the number of tensors and storages that share a StorageImpl.
_uses = torch._C._storage_Use_Count


def plain(stream: torch.Stream) -> torch.Stream:
    """Return the stream as ``torch.accelerator`` does; a ``torch.cuda.Stream`` has another hash."""
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


@cache
def _pins_memory(device_type: str) -> bool:
    """Return whether torch can allocate pinned memory for a type of device."""
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except (NotImplementedError, RuntimeError):  # the backend has no allocator for it
        return False


_DEFAULT = 0
"""The ``stream_id`` of a device's default stream."""


class AcceleratorDevice:
    """One accelerator; the current one if ``device`` has no index."""

    has_streams = True

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self.type = device.type
        self._index = index
        self.name = str(self.device)
        self.has_nvtx = self.type == "cuda"  # NVIDIA's tools show them
        self.pins_memory = _pins_memory(self.type)
        self.autocast_types: tuple[str, ...] = ("cpu", self.type)
        self._module = torch.get_device_module(self.type)
        self._records_streams = self._can_record_streams()
        self._warned = False

    def _can_record_streams(self) -> bool:
        """Return whether the backend has ``Tensor.record_stream``.

        Raises:
            ValueError: The device has no streams and events that torch can use.
        """
        try:
            stream = self.current_stream()
            self.new_event().record(stream)
        except (NotImplementedError, RuntimeError) as error:
            why = str(error).partition("\n")[0]
            raise ValueError(
                f"device {self.name!r} has no streams and events that torch can use: {why}; "
                "give 'cpu' if the tasks' tensors can be there"
            ) from error
        try:
            torch.empty(1, device=self.device).record_stream(stream)
        except NotImplementedError:
            return False
        return True

    def new_stream(self, spec: StreamSpec | torch.Stream) -> Stream:
        if isinstance(spec, torch.Stream):
            stream = plain(spec)
        else:
            stream = torch.Stream(device=self.device, priority=spec.priority)
        if stream.stream_id != _DEFAULT and not self._records_streams:
            raise ValueError(
                f"device {self.name!r} cannot keep memory that several streams use, since its "
                "backend has no Tensor.record_stream: leave the streams out of the plan "
                "(stream=None)"
            )
        if stream.stream_id == _DEFAULT and not self._warned:
            self._warned = True
            warnings.warn(
                f"device {self.name!r} has one stream only: the plan's streams are all its default "
                "stream, so their work does not overlap",
                stacklevel=2,
            )
        return stream

    def current_stream(self) -> Stream:
        return _current_stream(self._index)

    # A ``torch.Stream`` is a context manager itself, but keeps the stream that was current before
    # in the stream object, which several threads share here.
    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        index = _current_device_index()
        before = self.current_stream()
        self.make_current(stream)
        try:
            yield
        finally:
            self.make_current(before)  # whichever stream the block left current
            if index != self._index:
                torch.accelerator.set_device_index(index)

    def make_current(self, stream: Stream) -> None:
        index = self._index
        if _current_device_index() != index or _current_stream(index) != stream:
            _set_stream(stream)

    def new_event(self, *, timing: bool = False) -> Event:
        event: Event = torch.Event(device=self.device, enable_timing=timing)
        return event

    def holds_work(self, value: Any) -> bool:
        return any(tensor.device.type == self.device.type for tensor in tensors_held(value))

    def hold(self, values: Iterable[Any], streams: Iterable[Stream]) -> None:
        # The allocator keeps a block that was recorded on a stream until that stream's work is
        # done; recording the block on the stream that made it costs nothing.
        if self._records_streams:  # else there is one stream only, and nothing to keep
            record_stream(tuple(values), *streams)

    def take_over(self, values: list[Any], streams: Iterable[Stream]) -> list[Any]:
        # References to the storages only: with the tensors gone, use counts show whether others are
        # left.
        storages = device_storages(values, *streams)
        values.clear()
        taken = []
        for storage in storages:
            memory = _memory(storage)
            if _uses(storage._cdata) > _own_uses():  # others may use and drop it
                self.hold([memory], streams)
            else:
                taken.append(memory)
        return taken

    def use_on_this_thread(self) -> None:
        torch.accelerator.set_device_index(self.device.index)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def generator_states(self) -> GeneratorStates:
        return {
            CpuDevice.type: torch.get_rng_state(),
            self.name: self._module.get_rng_state(self.device),
        }

    def set_generator_states(self, states: GeneratorStates) -> None:
        if (state := states.get(CpuDevice.type)) is not None:
            torch.set_rng_state(state)
        if (state := states.get(self.name)) is not None:
            self._module.set_rng_state(state, self.device)

    def seed_generators(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        with torch.accelerator.device_index(self.device.index):
            self._module.manual_seed(seed)


def _memory(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor with the memory of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@cache
def _own_uses() -> int:
    """Return the use count of a storage to which nobody but ``take_over`` refers."""
    # Measured, since the count depends on torch's version: a storage, and a tensor made from it.
    storage = torch.empty(1).untyped_storage()
    held = [_memory(storage)]
    count = _uses(storage._cdata)
    held.clear()
    return count
