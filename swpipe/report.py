"""What a run to the end of the data did."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from swpipe.core.context import IterContext
from swpipe.device import Device


@dataclass(frozen=True, slots=True)
class RunReport:
    """What ``run`` and ``run_serial`` did.

    Attributes:
        iterations: How many iterations went through all tasks.
        seconds: Wall time from the first pull to the end of the device's work.
    """

    iterations: int
    seconds: float

    @property
    def iterations_per_s(self) -> float:
        """Iterations per second; 0 where there was none."""
        return self.iterations / self.seconds if self.seconds else 0.0


def run_to_end(
    contexts: Iterator[IterContext], device: Device, loader: Iterable[Any], label: str | None
) -> RunReport:
    """Ask for one context after the other until there are no more.

    Args:
        contexts: Each asked for runs an iteration.
        device: Waited for at the end.
        loader: Where the batches come from; its length, if it has one, is the progress bar's.
        label: What the progress bar is called; None for no bar.
    """
    iterations = 0
    begin = time.perf_counter()
    with nullcontext() if label is None else _progress_bar(loader, label) as bar:
        for ctx in contexts:
            iterations += 1
            if bar is not None:
                bar.update()
            del ctx  # the loop's variable would keep it through the next iteration
    device.synchronize()
    return RunReport(iterations, time.perf_counter() - begin)


def _progress_bar(loader: Iterable[Any], label: str) -> Any:
    from tqdm import tqdm

    total = len(loader) if isinstance(loader, Sized) else None
    return tqdm(total=total, desc=label, unit="step")
