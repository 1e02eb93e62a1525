"""Time iterations, serially or in the steady state under the plan.

A run of iterations under the plan; times are taken at the bars::

    fill + warm-up                 measured                    end
    progress() progress() ... | progress() | progress() | ... | drain()

Serially each iteration is timed on its own, from idle device to idle device. Under the plan the
time of a single ``progress()`` varies, because threads run ahead: only the mean of several, or the
median of spans that are as long as the pipeline is deep, says something. If the device has timing
events, the times are those at which the device finishes an iteration, so nothing waits within a
run.

Garbage is collected as in training: it is part of the step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from swpipe.core.effects import UNKNOWN, Effects
from swpipe.core.loaders import is_apart
from swpipe.pipeline import SWPipeline
from swpipe.profiler.host import HostRun, HostTimes
from swpipe.trace import Trace
from swpipe.trace.recorder import timed_event


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
        self.runs: list[HostRun] = []

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
            self.runs.append(HostRun(len(self.runs), wall_s, cpu_s))

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


@dataclass(frozen=True, slots=True)
class WindowTimer:
    """Times iterations that all get the same batch.

    Attributes:
        pipe: The pipeline; idle, and borrowed for profiling.
        copy: Makes the batches from ``batch``, before the iterations that get them.
        warmup: Iterations before those that are timed; at least 1, in which a shortcut task is
            cached.
        pulls: Called where an iteration gets its batch; None for nothing.
    """

    pipe: SWPipeline[Any]
    batch: Any
    copy: Callable[[Any], Any] | None
    warmup: int
    measure: int
    pipelined: bool
    pulls: Pulls | None = None

    @property
    def num_warmup(self) -> int:
        """Iterations that are not timed, at the beginning and after each change of shortcuts.

        Under the plan, ``depth`` iterations may be in flight at a change, and threads that were
        ahead may stay ahead for one more. The time of the next one begins when that is retired.
        """
        return max(self.warmup, self.pipe.plan.depth + 2 if self.pipelined else 1)

    def window(self, times: HostTimes | None = None) -> list[float]:
        """Seconds per iteration, one or more samples; ``times`` gets those of each task."""
        run = self.run()
        seen = times.observer() if times else None
        with self.pipe.observe(seen) if seen else nullcontext():
            measured = run.iterate(self.num_warmup, self.measure)
            run.end()
        if times and seen:
            times.add(seen, run.numbers[measured])
        return self.spans(run.seconds()[measured])

    def device_times_s(self) -> dict[str, float]:
        """How long the work that each task queues takes on its stream, in seconds per iteration.

        The time between two events, before and after that work. If the host queues work more
        slowly than the device executes it, this includes idle time of the device: it is then close
        to the host time and higher than the time the device is busy. Empty if the device has no
        streams, or its events have no timing.
        """
        if not self.pipe.device.has_streams:
            return {}
        first = self.pipe.next_iteration + self.num_warmup
        with self.pipe.trace() as trace:
            self.window()
        measured = Trace(span for span in trace.spans if span.iteration >= first).task_times()
        return {each.task: each.mean_s for each in measured if each.row.kind == "stream"}

    def run(self) -> TimedRun:
        """Begin a run of iterations."""
        feed = _Feed(self.batch, self.copy, self.pulls)
        return (TimedRun if self.pipelined else SerialRun)(self.pipe, feed)

    def spans(self, seconds: Sequence[float]) -> list[float]:
        """Means of as many neighbouring iterations as the pipeline is deep."""
        span = min(self.pipe.plan.depth, len(seconds)) if self.pipelined else 1
        return [sum(seconds[i : i + span]) / span for i in range(len(seconds) - span + 1)]


class _Feed:
    """The batches of a run: an iterator that has as many as were asked for ahead.

    ``pull`` is called for each that is taken.
    """

    def __init__(
        self,
        batch: Any,
        copy: Callable[[Any], Any] | None,
        pull: Callable[[], object] | None = None,
    ) -> None:
        self._batch, self._copy, self._pull = batch, copy, pull
        self._ahead: deque[Any] = deque()

    def prepare(self, count: int) -> None:
        """Have so many more batches."""
        for _ in range(count):
            self._ahead.append(self._batch if self._copy is None else self._copy(self._batch))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._ahead:
            raise StopIteration
        if self._pull is not None:
            self._pull()
        return self._ahead.popleft()


class TimedRun:
    """Iterations in a row under the plan; each that is counted is one that was retired.

    Attributes:
        numbers: Those of the iterations.
    """

    def __init__(self, pipe: SWPipeline[Any], feed: _Feed) -> None:
        self._pipe, self._feed = pipe, feed
        self.numbers: list[int] = []
        self._marks: list[Any] = []  # when each was retired

    def iterate(
        self, warmup: int, measure: int, begin_to_measure: Callable[[], object] = lambda: None
    ) -> slice:
        """Run iterations; returns where the measured ones are in ``seconds`` and ``numbers``.

        ``begin_to_measure`` is called between the two kinds, and should take no time.
        """
        begin = len(self.numbers) + warmup
        self._feed.prepare(self._ahead() + warmup + measure)
        for turn in range(warmup + measure):
            if turn == warmup:
                begin_to_measure()
            self.numbers.append(self._next())
        return slice(begin, begin + measure)

    def end(self) -> None:
        """Let the iterations in flight end; they are not counted."""
        self._pipe.drain()

    def seconds(self) -> list[float]:
        """The time from the retirement before to that of each iteration; call it after ``end``."""
        if not self._on_device:
            return [0.0, *(late - early for early, late in pairwise(self._marks))]
        self._pipe.device.synchronize()
        return [0.0, *(early.elapsed_time(late) / 1e3 for early, late in pairwise(self._marks))]

    @cached_property
    def _on_device(self) -> bool:
        return timed_event(self._pipe.device) is not None

    def _ahead(self) -> int:
        """How many more batches the next iteration takes than one."""
        return 0 if self._pipe.in_flight else self._pipe.plan.depth - 1

    def _next(self) -> int:
        """Run one iteration; returns its number."""
        number: int = self._pipe.progress(self._feed).iter_idx
        if self._on_device:  # the caller's stream waits for the retired iteration
            mark: Any = self._pipe.device.new_event(timing=True)
            mark.record(self._pipe.device.current_stream())
        else:
            mark = time.perf_counter()
        self._marks.append(mark)
        return number


class SerialRun(TimedRun):
    """Serial iterations in a row, each timed on its own."""

    def __init__(self, pipe: SWPipeline[Any], feed: _Feed) -> None:
        super().__init__(pipe, feed)
        self._first = pipe.next_iteration
        self._seconds: list[float] = []

    def seconds(self) -> list[float]:
        return self._seconds

    def _ahead(self) -> int:
        return 0

    def _next(self) -> int:
        number = self._first + len(self._seconds)
        wait = self._pipe.device.synchronize
        wait()
        begin_s = time.perf_counter()
        self._pipe.run_one_serial_iter(next(self._feed), number)
        wait()
        self._seconds.append(time.perf_counter() - begin_s)
        return number
