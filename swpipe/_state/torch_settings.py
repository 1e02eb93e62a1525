"""torch's settings for the whole process and for the calling thread: saved, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PROCESS_WIDE = {
    "set_default_dtype",
    "set_default_tensor_type",
    "set_float32_matmul_precision",
    "use_deterministic_algorithms",
}
"""Names of functions that change what every thread computes."""


def _deterministic() -> tuple[bool, bool]:
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled, torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_HOST = torch.empty(0, device="cpu").device


def _set_device(value: torch.device) -> None:
    torch.set_default_device(None if value == _HOST else value)  # None leaves no mode behind


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_device),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_deterministic, _set_deterministic),
)


def save_torch_settings() -> Callable[[], None]:
    """Save the settings as they are now; the result puts back those that have changed."""
    saved = [get() for get, _ in _SETTINGS]

    def restore() -> None:
        for (get, put), value in zip(_SETTINGS, saved, strict=True):
            if get() != value:
                put(value)

    return restore
