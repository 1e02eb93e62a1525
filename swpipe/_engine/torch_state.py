"""What a thread knows of torch: taken from the caller, put on in workers.

Some of torch's settings belong to the process (default dtype, deterministic algorithms) and need no
carrying; the rest belongs to a thread, and a new thread starts with torch's defaults. A snapshot is
taken at every ``progress()``; an iteration carries the one under which it was admitted, and a
worker puts it on when it differs from the one that it wears.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Autocast(NamedTuple):
    """Whether and to what operations are cast on one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def of_this_thread(cls, device_type: str) -> Autocast:
        """The calling thread's setting for ``device_type``."""
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
        )


class TorchState(NamedTuple):
    """The settings of one thread that tasks can feel.

    Named tuples, not dataclasses: they are made and compared at every ``progress()``.
    """

    grad: bool
    inference: bool
    autocast: tuple[Autocast, ...]
    default_device: torch.device | None
    threads: int

    @classmethod
    def of_this_thread(cls, device_type: str) -> TorchState:
        """The settings of the calling thread, for the CPU and ``device_type``."""
        autocast: tuple[Autocast, ...] = (Autocast.of_this_thread("cpu"),)
        if device_type != "cpu":
            autocast += (Autocast.of_this_thread(device_type),)
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            _default_device(),
            torch.get_num_threads(),
        )


def _default_device() -> torch.device | None:
    """The default device that this thread has set; None for torch's own."""
    # Asking for the device walks the stack of modes in Python; nearly always there is none.
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


class Wardrobe:
    """Puts snapshots on the thread that it is made on; ``off`` before the thread ends.

    Attributes:
        worn: The snapshot that the thread wears; None for its own settings.
    """

    def __init__(self) -> None:
        self.worn: TorchState | None = None
        self._inference: torch.autograd.grad_mode.inference_mode | None = None
        self._device: torch.device | None = None

    def wear(self, state: TorchState) -> None:
        """Make the thread's settings those of ``state``; free where it wears them already."""
        if state == self.worn:
            self.worn = state
            return
        # Inference mode carries a grad mode of its own, so it goes first.
        self.off()
        if state.inference:
            self._inference = torch.inference_mode()
            self._inference.__enter__()
        torch.set_grad_enabled(state.grad)
        for kind, enabled, dtype in state.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        # Not the caller's setting: torch clears its cache of casts when the caller leaves autocast,
        # which a worker never does, so that a step's forward would find the step before's weights.
        torch.set_autocast_cache_enabled(False)
        if state.default_device is not None:
            self._device = state.default_device
            self._device.__enter__()
        # The OpenMP runtime keeps the count per thread, so each thread has to set it.
        torch.set_num_threads(state.threads)
        self.worn = state

    def off(self) -> None:
        """Leave the modes that were entered."""
        if self._device is not None:
            self._device.__exit__(None, None, None)
            self._device = None
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
            self._inference = None
        self.worn = None
