"""What it costs to pull a batch: the time in the loader, which no task has."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from swpipe.core.costs import TaskCost


class Pulled(NamedTuple):
    """Batches, and what pulling one cost.

    Attributes:
        batches: All of them.
        cost: The mean; None for batches that are there already. ``gil_us`` is the thread's CPU
            time, of which Python may have released the lock for a part.
    """

    batches: list[Any]
    cost: TaskCost | None


def pull_all(batches: Iterable[Any]) -> Pulled:
    """Pull all batches of a loader, one by one, and time it; a sequence has them already.

    The first pull does not count where there are more: a loader starts its workers in it.
    """
    if isinstance(batches, Sequence):
        return Pulled(list(batches), None)
    iterator, found = iter(batches), []
    times: list[tuple[float, float]] = []
    while True:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        try:
            found.append(next(iterator))
        except StopIteration:
            break
        times.append((time.perf_counter() - wall_s, time.thread_time() - cpu_s))
    if not times:
        return Pulled(found, None)
    host_us, cpu_us = (1e6 * fmean(some) for some in zip(*(times[1:] or times), strict=True))
    return Pulled(found, TaskCost(host_us, gil_us=min(host_us, cpu_us)))
