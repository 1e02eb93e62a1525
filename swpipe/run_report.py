"""What a run to the end of the data did."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

from swpipe.core.context import TypedContext
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan
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

    @property
    def iterations_per_s(self) -> float:
        """Iterations per second; 0 where there was none."""
        return self.iterations / self.seconds if self.seconds else 0.0


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


class TimedPulls(Iterator[Any]):
    """An iterator that counts the time in which another one is called.

    Attributes:
        seconds: Of all calls but the first, in which a loader starts its workers.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._begun = False
        self.seconds = 0.0

    def __next__(self) -> Any:
        begin = time.perf_counter()
        batch = next(self._batches)
        if self._begun:
            self.seconds += time.perf_counter() - begin
        self._begun = True
        return batch

    def warn_if_most(self, report: RunReport, plan: PipelinePlan) -> RunReport:
        """Warn the caller of ``SWPipeline.run`` if the run spent most of its time in them.

        Not if nothing overlaps under the plan, or the caller's thread does nothing else.
        """
        groups = {entry.thread_group for entry in plan.schedule.values()}
        told = plan.depth > 1 and plan.pull_group is None and DEFAULT_GROUP in groups
        # Without figures in it, Python shows the warning once for each place in the user's code.
        if told and report.iterations >= 20 and self.seconds > max(0.1, report.seconds / 2):
            warnings.warn(
                "most of this run's time went into pulling batches on the caller's thread, where "
                "no task runs meanwhile. Let another thread pull them: replace(plan, "
                'pull_group="loader"), as prefetch_plan does, or use swpipe.overlap',
                RuntimeWarning,
                stacklevel=4,
            )
        return report
