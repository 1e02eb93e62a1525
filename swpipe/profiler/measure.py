"""Time windows of iterations.

A window under the plan; times are taken at the bars::

    fill + warm-up                 measured                    drain
    progress() progress() ... | progress() | progress() | ... | drain()

In a serial window each iteration is timed on its own, from idle device to idle device. Under the
plan the time of a single ``progress()`` varies, because threads run ahead. So a sample spans as
many iterations as the pipeline is deep. If the device has timing events, the times are those at
which the device finishes an iteration, so nothing waits within a window.

Garbage is collected within a window as in training: it is part of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

from swpipe.pipeline import SWPipeline
from swpipe.profiler.host import HostTimes
from swpipe.trace.recorder import timed_event


@dataclass(frozen=True, slots=True)
class WindowTimer:
    """Times windows in which every iteration gets the same batch.

    Attributes:
        pipe: The pipeline; idle, and borrowed for profiling.
        copy: Makes the batches of a window from ``batch``, before the window.
        warmup: Iterations before the first sample; at least 1, in which a shortcut task is cached.
    """

    pipe: SWPipeline
    batch: Any
    copy: Callable[[Any], Any] | None
    warmup: int
    measure: int
    pipelined: bool

    @property
    def overlap(self) -> int:
        """How many iterations a sample spans."""
        return min(self.pipe.plan.depth, self.measure) if self.pipelined else 1

    def window(self, times: HostTimes | None = None) -> list[float]:
        """Seconds per iteration, one or more samples; ``times`` gets those of each task."""
        if times is None:
            return self._pipelined() if self.pipelined else self._serial()
        begin = self.pipe.next_iteration + self.num_warmup
        with self.pipe.observe(times):
            samples = self.window()
        times.keep(range(begin, begin + self.measure))
        return samples

    @property
    def num_warmup(self) -> int:
        """Iterations of a window that are not timed."""
        # The first ``depth`` periods may still be in the prologue.
        least = self.pipe.plan.depth if self.pipelined else 1
        return max(self.warmup, least)

    def _feed(self, count: int) -> Iterator[Any]:
        if self.copy is None:
            return repeat(self.batch, count)
        return iter([self.copy(self.batch) for _ in range(count)])

    def _serial(self) -> list[float]:
        pipe, first = self.pipe, self.pipe.next_iteration
        wait = pipe.device.synchronize
        samples = []
        for i, batch in enumerate(self._feed(self.num_warmup + self.measure)):
            wait()
            begin = time.perf_counter()
            pipe.run_one_serial_iter(batch, first + i)
            wait()
            samples.append(time.perf_counter() - begin)
        return samples[self.num_warmup :]

    def _pipelined(self) -> list[float]:
        pipe, span = self.pipe, self.overlap
        feed = self._feed(pipe.plan.depth - 1 + self.num_warmup + self.measure)
        for _ in range(self.num_warmup):
            pipe.progress(feed)
        marks = _Marks(pipe)
        marks.set()
        for _ in range(self.measure):
            pipe.progress(feed)
            marks.set()
        pipe.drain()
        at_s = marks.seconds()
        return [(late - early) / span for early, late in zip(at_s, at_s[span:], strict=False)]


class _Marks:
    """The times at which iterations finish, by timing events of the device or by the host clock."""

    def __init__(self, pipe: SWPipeline) -> None:
        self._device = pipe.device
        self._on_device = timed_event(pipe.device) is not None
        self._at_s: list[float] = []
        self._events: list[Any] = []

    def set(self) -> None:
        """Mark the end of the retired iteration, which the caller's stream waits for."""
        if self._on_device:
            event = self._device.new_event(timing=True)
            event.record(self._device.current_stream())
            self._events.append(event)
        else:
            self._at_s.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """All marks, relative to any origin."""
        if not self._on_device:
            return self._at_s
        self._device.synchronize()
        at_s = [0.0]
        for early, late in pairwise(self._events):
            at_s.append(at_s[-1] + early.elapsed_time(late) / 1e3)
        return at_s
