"""Device work of known length, on CUDA or else on the test backend, "sim"."""

from __future__ import annotations

from functools import cache

import torch

from tests import backend

SIMULATED = not torch.cuda.is_available()


@cache
def device() -> torch.device:
    """Return CUDA, or else the test backend, which cannot be unloaded, or else the CPU."""
    if SIMULATED and backend.why_not() is None:
        backend.load()
    return torch.accelerator.current_accelerator() or torch.device("cpu")


@cache
def _cycles_per_ms() -> float:
    torch.cuda._sleep(300_000_000)  # long enough for an idle device to raise its clock
    begin, end = (torch.Event(device=device(), enable_timing=True) for _ in range(2))
    cycles = 50_000_000
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / begin.elapsed_time(end)


def spin(ms: float) -> None:
    """Keep the current stream busy for about ``ms``, on one of the device's many processors."""
    if SIMULATED:
        backend.lag(1e3 * ms)
    else:
        torch.cuda._sleep(int(ms * _cycles_per_ms()))
