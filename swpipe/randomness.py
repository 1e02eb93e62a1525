"""The same draws under every plan.

torch's default generators are shared by all threads, so two tasks that draw at the same time get
numbers that depend on timing. A task with ``random=True`` therefore runs under a lock, with the
generators seeded from (pipeline's seed, task, iteration), and they are put back afterwards, so that
draws outside the pipeline (a data loader's shuffling) do not depend on the plan either.

Assumptions: every task that draws says so; and while iterations are in flight, nobody else draws
from the default generators. The user's iterator may: it is pulled under the same lock.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Draws:
    """Seeds the runs of tasks that draw.

    Attributes:
        seed: What the draws of all tasks derive from.
        lock: Held by whoever draws.
    """

    def __init__(self, seed: int | None, device_type: str) -> None:
        self.seed = torch.initial_seed() if seed is None else seed
        self.lock = threading.Lock()
        self._accelerator = None if device_type == "cpu" else torch.get_device_module(device_type)

    @contextmanager
    def of(self, task: str, iteration: int) -> Iterator[None]:
        """Within the block the generators stand where this task of this iteration begins."""
        key = hashlib.sha256(f"{self.seed}/{task}/{iteration}".encode()).digest()
        seed = int.from_bytes(key[:7], "little")
        device = self._accelerator
        with self.lock:
            host_state = torch.get_rng_state()
            device_state = None if device is None else device.get_rng_state()
            try:
                torch.default_generator.manual_seed(seed)
                if device is not None:
                    device.manual_seed(seed)
                yield
            finally:
                torch.set_rng_state(host_state)
                if device is not None:
                    device.set_rng_state(device_state)
