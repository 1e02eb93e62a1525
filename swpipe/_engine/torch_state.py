"""torch's per-thread settings: read from the caller, applied on worker threads.

Some of torch's settings belong to the process (default dtype, deterministic algorithms). The others
belong to a thread, and a new thread starts with torch's defaults. The caller's are read at every
``progress()``; an iteration keeps those under which it was admitted, and a worker thread applies
them where they differ from those that it has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TorchState(NamedTuple):
    """The settings of one thread that tasks can depend on.

    A named tuple, not a dataclass: one is made and compared at every ``progress()``. ``autocast``
    has a tuple (device type, enabled, dtype) for each device type.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_device: torch.device | None
    threads: int

    @classmethod
    def of_this_thread(cls, autocast_types: tuple[str, ...]) -> TorchState:
        """The settings of the calling thread; autocast for these device types."""
        is_enabled = torch.is_autocast_enabled
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple([(k, is_enabled(k), torch.get_autocast_dtype(k)) for k in autocast_types]),
            _default_device(),
            torch.get_num_threads(),
        )


def _default_device() -> torch.device | None:
    """The default device that this thread has set; None for torch's own."""
    # Asking for the device walks the stack of modes in Python; nearly always there is none.
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


class ThreadTorchState:
    """Applies settings to one thread; call ``reset`` before the thread ends."""

    def __init__(self) -> None:
        self.applied: TorchState | None = None  # None for the thread's own
        self._inference: torch.autograd.grad_mode.inference_mode | None = None
        self._device: torch.device | None = None

    def apply(self, state: TorchState) -> None:
        """Make the thread's settings those of ``state``, unless they are."""
        if state == self.applied:
            self.applied = state
            return
        # Inference mode carries a grad mode of its own, so it goes first.
        self.reset()
        if state.inference:
            self._inference = torch.inference_mode()
            self._inference.__enter__()
        torch.set_grad_enabled(state.grad)
        for kind, enabled, dtype in state.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        # Not the caller's setting: torch clears its cache of casts when the caller leaves autocast,
        # which a worker never does: the next forward would use the weights of the step before.
        torch.set_autocast_cache_enabled(False)
        if state.default_device is not None:
            self._device = state.default_device
            self._device.__enter__()
        # The OpenMP runtime keeps the count per thread, so each thread has to set it.
        torch.set_num_threads(state.threads)
        self.applied = state

    def reset(self) -> None:
        """Leave the modes that were entered."""
        if self._device is not None:
            self._device.__exit__(None, None, None)
            self._device = None
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
            self._inference = None
        self.applied = None
