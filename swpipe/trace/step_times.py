"""Step times that are always on: p50 and p99 of the last steps, and the slowest rank.

A step is the time from handing out one iteration to handing out the next one, including the loop's
body. The first step after the end of a pass is not counted, since the pipeline fills again.

On several ranks, each rank writes its figures to the job's store, where rank 0 reads them. No rank
waits for another one: a rank's figures may be those of its last report.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from swpipe._distributed.rank_checks import is_alone, job_store
from swpipe._engine.observers import Observer
from swpipe.program import RETIRE, SOURCES, Instruction

_OF_RANK = "swpipe/steps/{}/{}"
_numbers = count()


class StepTimes(Observer):
    """An observer that reports step times, at about a microsecond per task and step.

    A report has ``step``, and milliseconds ``p50_ms`` and ``p99_ms``; on rank 0 of several ranks
    also ``worst_rank``, the rank with the greatest p50, with its ``worst_p50_ms`` and
    ``worst_p99_ms``. Ranks that wait for each other in every step have the same step times.

    A sink that raises is dropped, with a RuntimeWarning: training continues.

    Args:
        *sinks: Where reports go. A path: a line of JSON each. An object with TensorBoard's
            ``add_scalar``. A function that is called as ``wandb.log`` is: with the values, their
            names after "swpipe/", and ``step=``.
        every: Steps between two reports.
        last: The number of steps over which the percentiles are taken.

    Raises:
        TypeError: A sink is none of these.
        ValueError: ``every`` or ``last`` is below 1.
    """

    def __init__(self, *sinks: Any, every: int = 100, last: int = 1000) -> None:
        if every < 1 or last < 1:
            raise ValueError(f"every is {every} and last {last}: give 1 or more")
        self._write = [_writer(sink) for sink in sinks]
        self._every = every
        # Several reporters use one store: ranks create them in the same order, so numbers agree.
        self._number = next(_numbers)
        self._seconds: deque[float] = deque(maxlen=last)
        self._before: float | None = None
        self._ended = False
        self._compares = True
        self._steps = 0

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        """Measure a step when an iteration is handed out."""
        if ins.task == RETIRE:
            now = time.perf_counter()
            before = self._before
            self._before = now
            if before is not None:
                self._seconds.append(now - before)
                self._steps += 1
                if self._steps % self._every == 0:
                    self._report(iteration)
        elif ins.task in SOURCES:
            # The first batch after the end of a pass: the time since the last step is no step.
            if exists and self._ended:
                self._before = None
            self._ended = not exists

    def summary(self) -> dict[str, float]:
        """Return ``p50_ms`` and ``p99_ms`` of the last steps; empty before the first step."""
        times = sorted(self._seconds)
        at = {"p50_ms": 0.5, "p99_ms": 0.99} if times else {}
        # The nearest-rank percentile: a time that was measured, not an interpolation.
        return {name: 1e3 * times[math.ceil(part * len(times)) - 1] for name, part in at.items()}

    def _report(self, step: int) -> None:
        """Write a report to all sinks."""
        values = self.summary()
        if self._compares and not is_alone():
            try:
                values |= self._worst(values)
            except RuntimeError as gone:
                # The store is gone, as when rank 0 has ended: it will not come back.
                self._compares = False
                text = f"StepTimes compares ranks no longer: {gone}"
                warnings.warn(text, RuntimeWarning, 2)
        # A copy, since a sink that fails is removed while the loop runs.
        for write in tuple(self._write):
            try:
                write(values, step)
            except Exception as error:  # noqa: BLE001 - training goes on without it
                self._write.remove(write)
                text = f"a sink of StepTimes has failed, and gets no more reports: {error!r}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _worst(self, own: dict[str, float]) -> dict[str, float]:
        """Write this rank's figures, and return those of the slowest rank on rank 0."""
        store = job_store()
        rank = dist.get_rank()
        keys = [_OF_RANK.format(self._number, other) for other in range(dist.get_world_size())]
        store.set(keys[rank], json.dumps(own))
        # Not waiting here: a get of a missing key would block until the store's time-out.
        if rank or not store.check(keys):  # a rank has not reported yet
            return {}
        reports = [json.loads(text) for text in store.multi_get(keys)]
        worst = max(range(len(reports)), key=lambda other: float(reports[other]["p50_ms"]))
        return {"worst_rank": worst, **{f"worst_{name}": v for name, v in reports[worst].items()}}


def _writer(sink: Any) -> Callable[[dict[str, float], int], object]:
    """Return a function that writes values and a step to a sink."""
    if isinstance(sink, str | os.PathLike):
        path = Path(sink)

        def append(values: dict[str, float], step: int) -> None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")

        return append
    if hasattr(sink, "add_scalar"):
        return lambda values, step: [
            sink.add_scalar(f"swpipe/{name}", value, step) for name, value in values.items()
        ]
    if callable(sink):
        # Called by its own signature: wandb.log takes the step by name.
        return lambda values, step: sink(
            {f"swpipe/{name}": value for name, value in values.items()}, step=step
        )
    raise TypeError(
        f"{sink!r} is no sink: give a path, an object with add_scalar, or a function(values, step=)"
    )
