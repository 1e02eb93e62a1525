"""The CPU: work is done when the function returns, so streams and events are no-ops."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from swpipe.core.plan import StreamSpec
from swpipe.device.protocol import Event, GeneratorStates, Stream


class NoEvent:
    """The event of a device without streams, which is always reached."""

    def record(self, stream: Stream) -> None:
        return None

    def wait(self, stream: Stream) -> None:
        return None

    def query(self) -> bool:
        return True


class CpuDevice:
    """The host itself. Its methods do what ``Device`` says."""

    type = name = "cpu"
    # Lets the engine leave out the waits, records and holds of streams.
    has_streams = False
    has_nvtx = False
    pins_memory = False
    autocast_types: tuple[str, ...] = ("cpu",)

    # The one stream is None: equal to itself, as the protocol demands.
    def new_stream(self, spec: StreamSpec | torch.Stream) -> Stream:
        return None

    def current_stream(self) -> Stream:
        return None

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return nullcontext()

    def make_current(self, stream: Stream) -> None:
        return None

    def new_event(self, *, timing: bool = False) -> Event:
        return NoEvent()

    def holds_work(self, value: Any) -> bool:
        return False

    def hold(self, values: Iterable[Any], streams: Iterable[Stream]) -> None:
        return None

    def take_over(self, values: list[Any], streams: Iterable[Stream]) -> list[Any]:
        # Python frees the memory with the last reference: no stream can still use it.
        values.clear()
        return []

    def use_on_this_thread(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def generator_states(self) -> GeneratorStates:
        # By device name, so that a state saved here can be set on an accelerator, and the other way
        # round.
        return {CpuDevice.type: torch.get_rng_state()}

    def set_generator_states(self, states: GeneratorStates) -> None:
        if (state := states.get(CpuDevice.type)) is not None:
            torch.set_rng_state(state)

    def seed_generators(self, seed: int) -> None:
        # Not torch.manual_seed, which would also seed the accelerators.
        torch.default_generator.manual_seed(seed)


def on_cpu(place: torch.device | torch.Tensor | torch.UntypedStorage) -> bool:
    """Return whether a device is the CPU, or a tensor or a storage is in the host's memory."""
    device = place if isinstance(place, torch.device) else place.device
    return device.type == CpuDevice.type
