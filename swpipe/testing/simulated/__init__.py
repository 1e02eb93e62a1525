"""A simulated accelerator: device "sim", two devices whose streams are threads.

It is a C++ extension of PyTorch, built on first use. ``backend.cpp`` says what the device
guarantees, and ``streams.h`` how it reports events, waits and synchronizations to torch's trace
callbacks, as CUDA does. Once loaded, the device stays in the process.
"""

from __future__ import annotations

import atexit
from functools import cache

import torch
from torch.utils import backend_registration as backends

from swpipe.testing.simulated import build, device_module


@cache
def load() -> None:
    """Build the device if it is not built yet, and register it as "sim" in this process.

    Raises:
        RuntimeError: It cannot be built here, or the process has an accelerator of its own.
    """
    reason = build.why_not()
    if reason is not None:
        raise RuntimeError(reason)
    backends.rename_privateuse1_backend("sim")
    torch.ops.load_library(str(build.library()))  # type: ignore[no-untyped-call]
    torch._register_device_module("sim", device_module.make())  # type: ignore[no-untyped-call]
    backends.generate_methods_for_privateuse1_backend()
    atexit.register(torch.ops.sim.shut_down)
    torch.empty(
        0, device="sim"
    )  # torch.accelerator.synchronize() does nothing before the first use
