"""The report of a run to the end of the data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

from swpipe.core.context import TypedContext
from swpipe.core.progress import progress_bar
from swpipe.device import Device

__all__ = ["RunReport"]


@dataclass(frozen=True, slots=True)
class RunReport:
    """The result of ``run`` and ``run_serial``.

    Attributes:
        iterations: The number of iterations that completed.
        seconds: Wall time from the first pull to the end of the device's work.
    """

    iterations: int
    seconds: float

    def __float__(self) -> float:
        """Return the seconds."""
        return self.seconds


def run_to_end(
    contexts: Iterator[TypedContext], device: Device, loader: Iterable[Any], label: str | None
) -> RunReport:
    """Iterate over ``contexts``, wait for the device, and return a report.

    Args:
        contexts: The contexts; each request runs an iteration.
        device: The device that the tasks use.
        loader: The source of the batches; its length, if it has one, is the progress bar's.
        label: The progress bar's label; None for no bar.
    """
    iterations = 0
    begin = time.perf_counter()
    for ctx in contexts if label is None else _with_bar(contexts, loader, label):
        # The loop's variable would keep the context through the next iteration.
        del ctx
        iterations += 1
    device.synchronize()
    return RunReport(iterations, time.perf_counter() - begin)


def _with_bar(
    contexts: Iterator[TypedContext], loader: Iterable[Any], label: str
) -> Iterator[None]:
    total = len(loader) if isinstance(loader, Sized) else None
    with progress_bar(label, " steps", total) as bar:
        for ctx in contexts:
            del ctx
            bar.update()
            yield
