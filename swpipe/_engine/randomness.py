"""The same random numbers under every plan.

All threads share torch's default generators, so what two tasks draw at the same time depends on
timing. A task with ``random=True`` therefore has exclusive access to the generators while it runs.
They are seeded from (pipeline's seed, task, iteration), and restored afterwards, so that what is
drawn outside the pipeline (a data loader's shuffling) does not depend on the plan either.

    lane io       requests (0) == task ==|                 requests (2) ....== task ==|
    default lane           requests (1) ..== pulls a batch ==|

Guarantees
    - Access is given to one at a time, in the order of the requests.
    - Access belongs to one run. Whoever waits for it is woken when the run ends. A task that is
      still running then neither delays the next run nor changes the generators when it returns:
      they were restored on its behalf.

Assumptions
    - Every task that uses the default generators has ``random=True``; while iterations are in
      flight, nobody else uses them. The user's iterator may: a batch is pulled with exclusive
      access too.
    - A task that outlives its run draws no more random numbers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swpipe._engine.waiting import Cancelled, ProgressCounter
from swpipe.device import Device, GeneratorStates


class TaskSeeds:
    """Seeds the default generators for tasks with ``random=True``; all seeds derive from one."""

    def __init__(self, seed: int | None, device: Device) -> None:
        self.seed = torch.initial_seed() if seed is None else seed
        self.device = device

    @contextmanager
    def seeded(self, task: str, iteration: int) -> Iterator[None]:
        """Within the block the generators have the seed of this task and iteration."""
        before = self.begin(task, iteration)
        try:
            yield
        finally:
            self.device.set_generator_states(before)

    def begin(self, task: str, iteration: int) -> GeneratorStates:
        """Seed the generators for this task and iteration; returns their states before."""
        key = hashlib.sha256(f"{self.seed}/{task}/{iteration}".encode()).digest()
        before = self.device.generator_states()
        self.device.seed_generators(int.from_bytes(key[:7], "little"))
        return before


class GeneratorAccess:
    """Exclusive access to the default generators, within one run.

    ``counter`` counts the accesses that have ended.
    """

    def __init__(self, seeds: TaskSeeds, counter: ProgressCounter) -> None:
        self._seeds = seeds
        self._counter = counter
        self._lock = threading.RLock()
        self._requests = 0
        self._before: GeneratorStates | None = None
        self._ended = False

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within the block nobody else of this run uses the generators."""
        with self._lock:
            request = self._requests
            self._requests += 1
        self._counter.wait(request)
        try:
            yield
        finally:
            self._counter.advance(request + 1)

    @contextmanager
    def seeded(self, task: str, iteration: int) -> Iterator[None]:
        """Exclusive access, with the generators seeded for this task and iteration."""
        with self.exclusive():
            with self._lock:
                if self._ended:
                    raise Cancelled
                self._before = self._seeds.begin(task, iteration)
            try:
                yield
            finally:
                self._restore()

    def cancel(self) -> None:
        """Wake whoever waits for access."""
        self._counter.cancel()

    def end(self) -> None:
        """Give no further access; restore the generators for a task that is still running."""
        with self._lock:
            self._ended = True
        self._restore()

    def _restore(self) -> None:
        with self._lock:
            before, self._before = self._before, None
            if before is not None:
                self._seeds.device.set_generator_states(before)
