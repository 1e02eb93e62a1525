"""The interface of a device to the rest of swpipe, which does not depend on the kind of device.

``CpuDevice`` has no streams: a plan's streams have no meaning there, and its events are no-ops.
``AcceleratorDevice`` is CUDA or any other accelerator that torch supports. The tests have a third
device, which runs streams as late and in as unusual an order as the events allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

from swpipe.core.plan import StreamSpec

Stream: TypeAlias = Any
"""A device's stream; opaque to the engine, equal to itself alone."""

GeneratorStates: TypeAlias = Mapping[str, torch.Tensor]
"""Device name to the state of its default generator: the CPU's, and the device's own."""


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream) -> None:
        """Mark the end of the work submitted to ``stream`` so far; replaces an older mark."""

    def wait(self, stream: Stream) -> None:
        """Make work submitted to ``stream`` from now on wait for the marked point."""

    def query(self) -> bool:
        """Return whether the device has reached the marked point."""


class Device(Protocol):
    """A device that tasks submit work to.

    Attributes:
        type: The torch device type, such as "cpu" or "cuda".
        name: The type and index: "cuda:0".
        has_streams: Whether work is asynchronous, on streams ordered by events.
        has_nvtx: Whether tools show NVTX ranges next to its work.
        pins_memory: Whether copies to it are faster from pinned host memory.
        autocast_types: Device types whose autocast settings tasks can depend on.
    """

    type: str
    name: str
    has_streams: bool
    has_nvtx: bool
    pins_memory: bool
    autocast_types: tuple[str, ...]

    def new_stream(self, spec: StreamSpec | torch.Stream) -> Stream:
        """Return a new stream, or the stream that the user made.

        Raises:
            ValueError: The device cannot run a pipeline on several streams.
        """

    def current_stream(self) -> Stream:
        """Return the stream that is current on this thread."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make ``stream`` and its device current on this thread within the block."""

    def make_current(self, stream: Stream) -> None:
        """Make ``stream`` and its device current on this thread, unless they are already."""

    def new_event(self, *, timing: bool = False) -> Event:
        """Return a new event, not recorded yet."""

    def holds_work(self, value: Any) -> bool:
        """Return whether ``value`` has tensors on this device, whose work may not be done yet."""

    def hold(self, values: Iterable[Any], streams: Iterable[Stream]) -> None:
        """Keep the memory of ``values`` until the work submitted to ``streams`` so far is done."""

    def take_over(self, values: list[Any], streams: Iterable[Stream]) -> list[Any]:
        """Empty the list, and return the memory of its values that nobody else refers to.

        That memory is freed when the returned list is. The memory of all other values is held, as
        by
        ``hold``.
        """

    def use_on_this_thread(self) -> None:
        """Make this the current device of the calling thread."""

    def synchronize(self) -> None:
        """Wait until all work submitted to the device is done."""

    def generator_states(self) -> GeneratorStates:
        """Return the states of the default generators of the CPU and of this device."""

    def set_generator_states(self, states: GeneratorStates) -> None:
        """Set the generators' states that ``states`` has, whichever device they came from."""

    def seed_generators(self, seed: int) -> None:
        """Seed the default generators of the CPU and of this device."""
