"""Controls of the simulated accelerator, ``swpipe.testing.simulated``.

``load()`` registers it in this process permanently: torch then sees an accelerator, so tests that
need it run in a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from swpipe.testing.simulated import device_module, load
from swpipe.testing.simulated.build import why_not

__all__ = [
    "Gate",
    "Work",
    "charging",
    "clear_log",
    "gate",
    "lag",
    "load",
    "log",
    "misbehaving",
    "open_gates",
    "priority",
    "why_not",
]

POOL = 32
"""The number of streams that a device has for each priority."""


class Work(NamedTuple):
    """An executed kernel, with times of ``time.perf_counter_ns``."""

    device: int
    stream_id: int
    name: str
    start_ns: int
    end_ns: int


def lag(us: float, device: torch.device | str | int | None = None) -> None:
    """Keep the current stream of ``device`` busy for ``us`` microseconds; return at once."""
    torch.ops.sim.lag_on(_index(device), int(us))


class Gate:
    """A gate at which a stream waits until it is opened; leaving the block opens it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def open(self) -> None:
        torch.ops.sim.open_gate(self._number)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *failure: object) -> None:
        self.open()


def gate(device: torch.device | str | int | None = None, deadline_s: float = 30.0) -> Gate:
    """Put a gate on the current stream of ``device``.

    If it is not opened in time, the next wait of the host for the device raises.
    """
    return Gate(torch.ops.sim.gate(_index(device), deadline_s))


def open_gates() -> None:
    """Open all gates, at the end of a test that may have failed before it opened them."""
    torch.ops.sim.open_gates()


def log() -> list[Work]:
    """Return the work that streams have executed since ``clear_log()``, by its end."""
    numbers, names = torch.ops.sim.log()
    return [
        Work(device, stream, name, start, end)
        for (device, stream, start, end), name in zip(numbers.tolist(), names, strict=True)
    ]


def clear_log() -> None:
    """Clear the log of executed work."""
    torch.ops.sim.clear_log()


def priority(stream: torch.Stream) -> int:
    """Return the priority of a stream: -1 if it was made with a negative one, else 0."""
    number: int = torch.ops.sim.priority(stream.stream_id)
    return number


@contextmanager
def misbehaving(
    *,
    late_streams: float = 0.0,
    event_timing: bool = True,
    record_stream: bool = True,
    streams: int = POOL,
    no_new_streams: bool = False,
    poison: bool = False,
    link_us_per_mib: float = 0.0,
) -> Iterator[None]:
    """Make the devices as unfavourable as a backend of torch may be, within the block.

    Args:
        late_streams: Unless someone waits for it, work starts up to so many microseconds late.
        event_timing: Without, ``elapsed_time`` raises RuntimeError.
        record_stream: Without, ``Tensor.record_stream`` raises NotImplementedError.
        streams: The number of streams that a device has for each priority; they are reused.
        no_new_streams: Every new stream is the default stream.
        poison: Freed memory is overwritten with 0xFF on the stream that it was made on.
        link_us_per_mib: The additional time of copies between host and device, per MiB.
    """
    _settle()
    pool = 0 if no_new_streams else streams
    torch.ops.sim.behave(
        int(late_streams), pool, event_timing, record_stream, poison, int(link_us_per_mib)
    )
    try:
        yield
    finally:
        torch.ops.sim.behave(0, POOL, True, True, False, 0)
        _settle()


@contextmanager
def charging(
    *, launch_us: float = 0.0, queue: int = 1021, pageable_blocks: bool = True
) -> Iterator[None]:
    """Charge the host for launches within the block, as a real device does.

    Args:
        launch_us: The time per kernel, in microseconds, in addition to torch's.
        queue: The most items of a stream that have not begun; the host waits for room.
            The default is what CUDA has on an H200.
        pageable_blocks: A copy from memory that is not pinned is done when the call returns.
    """
    _settle()
    torch.ops.sim.charge(int(launch_us), queue, pageable_blocks)
    try:
        yield
    finally:
        torch.ops.sim.charge(0, 0, False)
        _settle()


def _settle() -> None:
    for device in range(device_module.DEVICES):
        torch.accelerator.synchronize(device)


def _index(device: torch.device | str | int | None) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index
