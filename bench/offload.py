"""Activations kept on the host between forward and backward: step time and device memory.

The device is CUDA, or otherwise the test backend with a link of 1.2 ms per MiB. A process cannot
unload the test backend.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from bench.measure import Row, Spread, compared, interleaved
from tests import backend
from tests.support.device_work import SIMULATED, device, spin
from tests.support.offload_layers import Layers, kept_bytes

LAYERS, STEPS, WARM_UP = 8, 10, 20
STEP_BAR, KEPT_BAR = 1.03, 1 / 3


def rows(rounds: int = 7) -> list[Row]:
    """Return the step time and the kept memory with offload, each over that without."""
    layers = Layers(LAYERS, device(), spin)
    with ExitStack() as stack:
        if SIMULATED:
            stack.enter_context(backend.misbehaving(link_us_per_mib=1200.0))
        every = range(LAYERS - 1)
        ours, theirs = interleaved(
            rounds, lambda: step_ms(layers, every), lambda: step_ms(layers, [])
        )
    kept = [kept_bytes(layers, which) / 2**20 for which in (every, [])]
    return [
        compared("8 layers, 7 offloaded: a step", ours, theirs, "ms", "on device", STEP_BAR),
        Row(
            "the same: activations kept on the device at most",
            f"{kept[0]:.1f} MiB",
            f"on device {kept[1]:.1f} MiB",
            Spread.of([kept[0] / kept[1]]),
            KEPT_BAR,
        ),
    ]


def step_ms(layers: Layers, which: Sequence[int]) -> float:
    """Return the time of a step in a warm pipeline, in ms."""
    with layers.pipeline(which) as pipe:
        pipe.run([layers.batch] * WARM_UP)  # the first 16 iterations are watched
        torch.accelerator.synchronize()
        gc.collect()
        begin = time.perf_counter()
        pipe.run([layers.batch] * STEPS)
        torch.accelerator.synchronize()
        return (time.perf_counter() - begin) / STEPS * 1e3
