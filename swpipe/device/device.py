"""Streams and events behind one small interface, so that nothing else asks what the device is.

Three devices stand behind it: ``CpuDevice`` has no streams, and a plan's streams then mean nothing;
``AcceleratorDevice`` is CUDA or any other accelerator that torch knows;
``swpipe.device.virtual.VirtualDevice`` runs streams as late and in as odd an order as the events
allow,
for tests.

The engine calls what concerns streams only where ``has_streams`` says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from swpipe._tensors.pytree import record_stream, tensors_in
from swpipe.core.errors import InternalError
from swpipe.core.plan import StreamSpec

Stream = Any
"""A device's stream; opaque to the engine, equal to itself alone."""


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream) -> None:
        """Mark the end of what ``stream`` was given so far; an older mark is forgotten."""

    def wait(self, stream: Stream) -> None:
        """Let what ``stream`` is given from now on start only after the point marked now."""

    def query(self) -> bool:
        """Whether the device has reached the point."""


class Device(Protocol):
    """What the engine asks of a device.

    Attributes:
        type: Its kind, such as "cpu" or "cuda".
        name: Its kind, and its index where it has one: "cuda:0".
        has_streams: Whether what concerns streams and events means anything.
    """

    type: str
    name: str
    has_streams: bool

    def new_stream(self, spec: StreamSpec) -> Stream:
        """A stream of its own."""

    def current_stream(self) -> Stream:
        """The stream that is current on this thread."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make ``stream`` current on this thread within the block."""

    def new_event(self, *, timing: bool = False) -> Event:
        """An event that has marked nothing yet."""

    def holds_work(self, value: Any) -> bool:
        """Whether ``value`` has tensors on this device, which may still be under way."""

    def hold(self, values: Iterable[Any], streams: Iterable[Stream]) -> None:
        """Keep the memory in ``values`` until what ``streams`` were given so far is done."""

    def use_on_this_thread(self) -> None:
        """Make this the current device of the calling thread."""

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""


class CpuDevice:
    """The host itself: work is done when the function returns."""

    type = name = "cpu"
    has_streams = False

    def new_stream(self, spec: StreamSpec) -> Stream:
        raise InternalError("a stream was asked for on a device that has none")

    def current_stream(self) -> Stream:
        return None

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return ExitStack()

    def new_event(self, *, timing: bool = False) -> Event:
        raise InternalError("an event was asked for on a device that has no streams")

    def holds_work(self, value: Any) -> bool:
        return False

    def hold(self, values: Iterable[Any], streams: Iterable[Stream]) -> None:
        return None

    def use_on_this_thread(self) -> None:
        return None

    def synchronize(self) -> None:
        return None


class _CurrentStream:
    """A stream is current within the block.

    A ``torch.Stream`` can do this itself, but keeps what was current before in the stream object,
    which several threads share here. To set a stream also sets the device that it is on.
    """

    __slots__ = ("_before", "_index", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._index = torch.accelerator.current_device_index()
        self._before = torch.accelerator.current_stream(self._stream.device)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *failure: object) -> None:
        torch.accelerator.set_stream(self._before)
        if self._index != self._before.device_index:
            torch.accelerator.set_device_index(self._index)


def plain(stream: torch.Stream) -> torch.Stream:
    """A stream as ``torch.accelerator`` tells it; a ``torch.cuda.Stream`` has another hash."""
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


class AcceleratorDevice:
    """CUDA, or another accelerator with streams and events."""

    has_streams = True

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self.type = device.type
        self.name = str(self.device)

    def new_stream(self, spec: StreamSpec) -> Stream:
        return torch.Stream(device=self.device, priority=spec.priority)

    def current_stream(self) -> Stream:
        return torch.accelerator.current_stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return _CurrentStream(stream)

    def new_event(self, *, timing: bool = False) -> Event:
        event: Event = torch.Event(device=self.device, enable_timing=timing)
        return event

    def holds_work(self, value: Any) -> bool:
        return any(tensor.device.type == self.type for tensor in tensors_in(value))

    def hold(self, values: Iterable[Any], streams: Iterable[Stream]) -> None:
        # The allocator keeps a block that was recorded on a stream until that stream's work is
        # done; recording it on the stream that it was made on costs nothing.
        record_stream(tuple(values), *streams)

    def use_on_this_thread(self) -> None:
        torch.accelerator.set_device_index(self.device.index)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)


def resolve(device: Device | torch.device | str | None) -> Device:
    """The device that a pipeline runs on; None is the machine's accelerator, or else the CPU.

    Raises:
        ValueError: The device is neither the CPU nor this machine's accelerator.
    """
    if device is not None and not isinstance(device, str | torch.device):
        if not hasattr(device, "has_streams"):
            raise ValueError(f"device is {device!r}: give a name such as 'cpu', or a torch.device")
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    wanted = accelerator or torch.device("cpu") if device is None else _known(device)
    if wanted.type == "cpu":
        return CpuDevice()
    if accelerator is None or wanted.type != accelerator.type:
        have = accelerator.type if accelerator else "no accelerator"
        raise ValueError(
            f"device {str(wanted)!r} is not on this machine, which has {have}; give 'cpu'"
        )
    return AcceleratorDevice(wanted)


def _known(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device {device!r} is none that torch knows: give a name such as 'cpu' or 'cuda:0'"
        ) from error
