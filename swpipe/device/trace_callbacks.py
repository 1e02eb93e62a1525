"""torch's callbacks for events, waits and synchronizations of an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch


def trace_callbacks(kind: str) -> Any:
    """Return the registries of callbacks for a kind of device, such as "cuda", switched on.

    Raises:
        RuntimeError: torch has none for it.
    """
    if kind == "cuda":  # torch imports this module on first use only
        import_module("torch.cuda._gpu_trace")
    registries = getattr(torch.get_device_module(kind), "_gpu_trace", None)
    if registries is None:
        raise RuntimeError(f"torch has no trace callbacks for device {kind!r}: use CUDA")
    activate: Callable[[], None] = torch._C._activate_gpu_trace
    activate()
    return registries


def stream_number(stream: Any) -> int:
    """Return the number of a stream in the callbacks."""
    if torch.device(stream.device).type == "cuda":
        cuda: Any = torch.cuda
        handle: int = cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        ).cuda_stream
        return handle
    number: int = stream.device_index << 16 | stream.stream_id
    return number
