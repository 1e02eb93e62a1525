"""What a run to the end of the data did."""

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
    """What ``run`` and ``run_serial`` did.

    Attributes:
        iterations: How many iterations completed.
        seconds: Wall time from the first pull to the end of the device's work.
    """

    iterations: int
    seconds: float

    def __float__(self) -> float:
        """The seconds."""
        return self.seconds


def run_to_end(
    contexts: Iterator[TypedContext], device: Device, loader: Iterable[Any], label: str | None
) -> RunReport:
    """Iterate over ``contexts``, then wait for the device.

    Args:
        contexts: Each one requested runs an iteration.
        device: The device that the tasks use.
        loader: Where the batches come from; its length, if it has one, is the progress bar's.
        label: The progress bar's label; None for no bar.
    """
    iterations = 0
    begin = time.perf_counter()
    for ctx in contexts if label is None else _with_bar(contexts, loader, label):
        del ctx  # the loop's variable would keep it through the next iteration
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
