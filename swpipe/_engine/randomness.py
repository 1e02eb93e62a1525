"""The same draws under every plan.

torch's default generators are shared by all threads, so two tasks that draw at the same time get
numbers that depend on timing. A task with ``random=True`` therefore runs when it has the turn, with
the generators seeded from (pipeline's seed, task, iteration), and they are put back afterwards, so
that draws outside the pipeline (a data loader's shuffling) do not depend on the plan either.

    lane io       asks (0) == draws ==|                    asks (2) ......== draws ==|
    default lane            asks (1) ..== pulls a batch ==|

Guarantees
    - One at a time draws, in the order in which they asked.
    - Turns are a run's own. Who waits for one is woken when the run ends, as from every other wait;
      and a task that is still inside its function then neither keeps the next run waiting nor
      touches the generators when it returns: they were put back on its behalf.

Assumptions
    - Every task that draws says so; and while iterations are in flight, nobody else draws from the
      default generators. The user's iterator may: it is pulled in a turn of its own.
    - A task that was left behind draws no more. Should it, the next run's draws are disturbed.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from swpipe._engine.waiting import Cancelled, Signal


class Generators(NamedTuple):
    """How torch's default generators stand: the CPU's, and the accelerator's where it has any."""

    host: torch.Tensor
    device: torch.Tensor | None


class Draws:
    """Seeds the runs of tasks that draw.

    Attributes:
        seed: What the draws of all tasks derive from.
    """

    def __init__(self, seed: int | None, device_type: str) -> None:
        self.seed = torch.initial_seed() if seed is None else seed
        self._accelerator = None if device_type == "cpu" else torch.get_device_module(device_type)

    @contextmanager
    def of(self, task: str, iteration: int) -> Iterator[None]:
        """Within the block the generators stand where this task of this iteration begins."""
        before = self.begin(task, iteration)
        try:
            yield
        finally:
            self.put_back(before)

    def begin(self, task: str, iteration: int) -> Generators:
        """Set the generators to where this task of this iteration begins; how they stood before."""
        key = hashlib.sha256(f"{self.seed}/{task}/{iteration}".encode()).digest()
        seed = int.from_bytes(key[:7], "little")
        device = self._accelerator
        before = Generators(
            torch.get_rng_state(), None if device is None else device.get_rng_state()
        )
        torch.default_generator.manual_seed(seed)
        if device is not None:
            device.manual_seed(seed)
        return before

    def put_back(self, before: Generators) -> None:
        """Let the generators stand as they did."""
        torch.set_rng_state(before.host)
        if self._accelerator is not None:
            self._accelerator.set_rng_state(before.device)


class Turns:
    """Who may draw, within one run.

    Args:
        draws: Of the pipeline.
        signal: Counts the turns that are over.
    """

    def __init__(self, draws: Draws, signal: Signal) -> None:
        self._draws = draws
        self._signal = signal
        self._lock = threading.Lock()
        self._asked = 0
        self._before: Generators | None = None
        self._over = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within the block nobody else of this run draws.

        Raises:
            Cancelled: The run has ended.
        """
        with self._lock:
            mine = self._asked
            self._asked += 1
        self._signal.wait(mine)
        try:
            yield
        finally:
            self._signal.advance(mine + 1)

    @contextmanager
    def of(self, task: str, iteration: int) -> Iterator[None]:
        """A turn, within which the generators stand where this task of this iteration begins.

        Raises:
            Cancelled: The run has ended.
        """
        with self.turn():
            with self._lock:
                if self._over:
                    raise Cancelled
                self._before = self._draws.begin(task, iteration)
            try:
                yield
            finally:
                self._put_back()

    def cancel(self) -> None:
        """Wake whoever waits for a turn."""
        self._signal.cancel()

    def end(self) -> None:
        """Give no further turn, and put the generators back for a task that was left behind."""
        with self._lock:
            self._over = True
        self._put_back()

    def _put_back(self) -> None:
        with self._lock:
            before, self._before = self._before, None
            if before is not None:
                self._draws.put_back(before)
