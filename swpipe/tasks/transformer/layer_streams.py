"""The streams of layer schedules: one for computation, one for exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from swpipe.core.plan import StreamSpec
from swpipe.device import Device, resolve

LayerStream: TypeAlias = torch.Stream | Callable[[], torch.Stream | None] | None
"""A stream, a function that returns one, or None for the caller's current stream."""

_given: dict[str, torch.Stream | None] = {"comp": None, "comm": None}


def set_streams(
    comp_stream: torch.Stream | None = None, comm_stream: torch.Stream | None = None
) -> None:
    """Set the streams of schedules that are made from now on; None for the defaults."""
    _given.update(comp=comp_stream, comm=comm_stream)


def get_comp_stream() -> torch.Stream | None:
    """The stream of computation; None for the current stream of whoever runs the schedule."""
    return _given["comp"]


def get_comm_stream() -> torch.Stream | None:
    """The stream of exchanges, made when first asked for; None on a machine without streams."""
    if _given["comm"] is None and (device := resolve(None)).has_streams:
        _given["comm"] = device.new_stream(StreamSpec(priority=-1))
    return _given["comm"]


def stream_of(given: LayerStream) -> torch.Stream | None:
    """What a function returns, or what was given in its place."""
    return given() if callable(given) else given


def device_of(model: torch.nn.Module) -> Device:
    """Where the first parameter of a model is; the machine's own device if it has none."""
    first = next(model.parameters(), None)
    return resolve(None if first is None else first.device)
