"""What it costs to pull a batch: the time in the loader, which no task has."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from swpipe.core.effects import UNKNOWN, Effects
from swpipe.core.loaders import is_apart
from swpipe.profiler.host import TaskRun


class Pulls:
    """Calls a loader once per iteration, as training does, and drops what it returns.

    It is begun again at its end. The iterations get the batch that is profiled.

    Attributes:
        effects: What its calls may touch.
        runs: The calls until now.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self.effects = Effects() if is_apart(loader) else UNKNOWN
        self._batches: Iterator[Any] | None = None
        self._on = True
        self.runs: list[TaskRun] = []

    def __call__(self) -> None:
        """Pull a batch.

        Raises:
            ValueError: There is none.
            BaseException: Whatever the loader raised.
        """
        if self._on:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            self._next()
            wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
            self.runs.append(TaskRun(len(self.runs), wall_s, cpu_s))

    def _next(self) -> None:
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self._loader)
            for _batch in self._batches:
                return
            self._batches = None
        raise ValueError(
            "the loader has no batch, or has ended and cannot be begun again: give a DataLoader "
            "or another object that makes a new iterator"
        )

    @contextmanager
    def off(self) -> Iterator[None]:
        """Pull nothing meanwhile."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def end(self) -> None:
        """Let the loader's iterator go: its workers end."""
        self._batches = None

    def begin(self) -> None:
        """Forget the calls so far: in the first one a loader starts its workers."""
        self.runs.clear()
