"""Timers of iterations, which run serially or in the steady state under the plan.

In a run of iterations under the plan, times are taken at the bars::

    fill + warm-up                 measured                    end
    progress() progress() ... | progress() | progress() | ... | drain()

A serial iteration is timed on its own, from idle device to idle device. Under the plan, the time
of a single ``progress()`` varies, because threads run ahead. Only the mean of several calls is
meaningful, or the median over spans that are as long as the pipeline is deep. If the device has
timing events, the times are those at which the device finishes an iteration, so nothing waits
within a run.

Garbage is collected as in training, since collection is part of the step.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import sub
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from swpipe._distributed.rank_checks import gather
from swpipe.core.effects import Effects, undeclared_effects
from swpipe.core.loaders import is_apart, unprepared
from swpipe.pipeline import SWPipeline
from swpipe.profiler.figures import LoaderPace
from swpipe.profiler.host import HostObserver, HostRun, ThreadTimes, thread_times, times_of
from swpipe.trace import Trace
from swpipe.trace.recorder import timed_event

_LEAST_CALLS = 4
_CALLS = 32
"""Calls of a loader that determine its rate: the fewest, and how many suffice if time allows."""

_RATE_S = 2.0
_SHORT_S = 0.02
"""Seconds after which calls stop in any case, and before which a queue may still be full."""

_PACE = 0.25
"""The means of two parts of the calls may differ by at most this fraction for a steady pace."""

_MOST_READY = 1024
"""An upper limit of the batches that any loader has ready."""

_TURNS = 8
"""The most workers for which the length of a visit is rounded up to one batch from each worker."""

_LOOKS = 3
_MOST_LOOKS = 64
_LOOKS_S = 2.0
"""Limits of the calls that show whether the loader works ahead: least, most, and seconds."""

_RARE = 32
"""One call in this many may take longer than usual by chance."""

_LONGER = 0.1
"""The first call of a pass is slow if it takes longer than others by more than this fraction."""


class Pulls:
    """Calls of a loader, one per iteration, as in training.

    The loader is restarted at its end. A loader that works ahead, in processes or threads of its
    own, has batches ready after any time in which it is not called, or is called less often than
    it could be. A few iterations would be served from these batches, at a pace that no epoch
    keeps. Therefore ``settle`` takes them away before a visit, and ``measure`` measures once how
    fast the loader is in the long run::

        burst of calls     |..|..|..|....60|....60|....60|   the batches that were ready; the rate
        before each visit  |..|..|..|....60|                 taken away until a call waits

    Without a loader no calls are made, and batches cost nothing.

    Attributes:
        effects: The locations that the loader's calls may touch.
        runs: The calls by iterations so far.
        rate_s: Seconds per batch in the long run, if nothing else is waited for; 0 if unknown.
        workers: The number of worker processes of a DataLoader; 0 if there are none.
        starts_workers: Whether the worker processes are started in each pass.
        drains: Whether ``settle`` may find batches to take away.
        length: The number of batches of a pass; 0 if unknown.
    """

    def __init__(self, loader: Iterable[Any] | None = None) -> None:
        self._loader: Any = loader
        undeclared = self.has_loader and not is_apart(loader)
        self.effects = undeclared_effects() if undeclared else Effects()
        self.runs: list[HostRun] = []
        self.rate_s = 0.0
        inner = unprepared(loader)
        is_torchs = isinstance(inner, DataLoader)
        self.workers: int = inner.num_workers if is_torchs else 0
        self.starts_workers = self.workers > 0 and not inner.persistent_workers
        # A DataLoader works ahead exactly if it has workers. For any other loader this is unknown
        # until it was measured.
        self._ahead: bool | None = self.workers > 0 if is_torchs else None
        self._batches: Iterator[Any] | None = None
        self._taken = 0  # batches taken in this pass
        self.length = length_of(loader)
        self._starts_s: list[float] = []
        self._on = self.has_loader
        self.drains = False
        self._usual_s = 0.0

    @classmethod
    def of(cls, loader: Iterable[Any] | Pulls | None) -> Pulls:
        """Return the calls of a loader. A ``Pulls`` is returned as it is, with its measurements."""
        return loader if isinstance(loader, Pulls) else cls(loader)

    def __call__(self) -> None:
        """Pull a batch and drop it, unless calls are switched off.

        Raises:
            ValueError: The loader has no batch.
            BaseException: Any exception of the loader.
        """
        if self._on:
            self.runs.append(self._timed()[1])

    def batches(self) -> Iterator[Any]:
        """Yield the loader's batches, pass after pass."""
        while True:
            yield self._timed()[0]

    @property
    def has_loader(self) -> bool:
        """Whether there is a loader."""
        return self._loader is not None

    @property
    def works_ahead(self) -> bool:
        """Whether the loader makes batches while it is not called; known after ``measure``."""
        return self._ahead is True

    @property
    def start_s(self) -> float:
        """The seconds that the start of a pass takes, divided by the steps of a pass; 0 if unknown.

        A first call counts as the start only if it is clearly slower than the slow calls that come
        now and then, for example for a chunk of batches.
        """
        if not self._starts_s or not self.length:
            return 0.0
        # The very first start may also create processes that persist, so it is left out if there
        # are others.
        longer_s = fmean(self._starts_s[1:] or self._starts_s) - self._usual_s
        return longer_s / self.length if longer_s > _LONGER * self._usual_s else 0.0

    @property
    def pace(self) -> LoaderPace | None:
        """The measured rate and start of the loader, for a result; None without a loader."""
        if not self.has_loader:
            return None
        return LoaderPace(
            self.rate_s, self.start_s, self.works_ahead, self.workers, self.starts_workers
        )

    def measure(self) -> None:
        """Measure the rate, the start of a pass and whether the loader works ahead.

        The calls made for it are removed from ``runs``.
        """
        if self.has_loader and not self.rate_s:
            # The first start of a pass may also create processes that persist, so a second start is
            # measured.
            if self.length:
                self._timed()
                self._begin_again()
            times_s: list[float] = []  # without first calls of passes
            all_s: list[float] = []
            # The number of calls doubles until the pace is steady: the first calls are served from
            # batches that were ready. All ranks stop together, since ``agreed`` is a collective.
            begin_s = time.perf_counter()
            while not self.agreed(_is_enough(len(all_s), times_s, time.perf_counter() - begin_s)):
                for _ in range(max(len(all_s), _LEAST_CALLS)):
                    all_s.append(self._timed()[1].wall_s)
                    if self._taken > 1:
                        times_s.append(all_s[-1])
            # Batches that are read in one chunk show as one slow call and many quick ones. So the
            # usual time is that of the slowest call, after one call in ``_RARE`` was dropped.
            self._usual_s = sorted(times_s or [0.0])[-1 - len(times_s) // _RARE]
            # Only the second half of the calls counts: by then the batches that were ready are used
            # up.
            last_s = times_s[len(times_s) // 2 :] or [0.0]
            periods_s = _from_slow_to_slow(times_s if self.start_s else all_s)
            self.rate_s = fmean(periods_s or last_s)
            if self._ahead is None and self.rate_s:
                self._look(math.ceil(2 * max(last_s) / self.rate_s))
            self.drains = not self.agreed(self._ahead is False or not self.rate_s)
        self.runs.clear()

    def in_turns(self, count: int) -> int:
        """Return ``count``, rounded up to a multiple of the workers if these are few."""
        # Workers make one batch each in rotation, so a whole rotation has a typical mix of waits.
        return -(-count // self.workers) * self.workers if 1 < self.workers <= _TURNS else count

    def settle(self, count: int) -> None:
        """Prepare ``count`` successive calls: no pass ends in them, and no batch is ready."""
        if not self._on:
            return
        if self.drains:
            self._drain()
        # The rest of this pass is too short, so a new pass is started before the calls that are
        # timed.
        if self.length and count <= self.length < self._taken + count:
            self._begin_again()
            if self.drains:
                self._drain()

    def _drain(self) -> None:
        """Pull batches until a call waits, which shows that no more batches were ready."""
        for _ in range(_MOST_READY):
            if self.agreed(self._timed()[1].wall_s >= self.rate_s / 2):
                break

    def _look(self, calls: int) -> None:
        """Find out whether calls are quick after a pause in which a batch could be made."""
        took_s = []
        for _ in range(max(_LOOKS, min(calls, int(_LOOKS_S / self.rate_s), _MOST_LOOKS))):
            time.sleep(self.rate_s)
            took_s.append(self._timed()[1].wall_s)
        self._ahead = not self.agreed(fmean(took_s) > self.rate_s / 2)

    def _begin_again(self) -> None:
        self._batches = None  # dropping the iterator ends its workers
        self._timed()

    def _timed(self) -> tuple[Any, HostRun]:
        begin = thread_times()
        batch = self._next()
        return batch, HostRun(len(self.runs), *map(sub, thread_times(), begin))

    def _next(self) -> Any:
        # The second attempt is for the end of a pass. A second end in a row means that there are no
        # batches.
        for _ in range(2):
            begin_s = time.perf_counter()
            if self._batches is None:
                self._batches = iter(self._loader)
                self._taken = 0
            for batch in self._batches:
                self._taken += 1
                if self._taken == 1:
                    self._starts_s.append(time.perf_counter() - begin_s)
                return batch
            self._batches = None
            # Now the length of a pass is known, also for a loader without ``__len__``.
            self.length = self._taken
        raise ValueError(
            "the loader has no batch, or has ended and cannot be restarted: give a DataLoader "
            "or another object that makes a new iterator"
        )

    @staticmethod
    def agreed(own: bool) -> bool:
        """Return whether ``own`` is true on all ranks, which take the same number of batches."""
        return all(gather(own))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Pull nothing inside the block."""
        self._on = False
        try:
            yield
        finally:
            self._on = True


def _from_slow_to_slow(times_s: Sequence[float]) -> Sequence[float]:
    """Return the calls from the first slow one to the last slow one.

    They are whole periods of a loader that reads chunks of batches. Empty if slow calls are not
    few.
    """
    # The first quarter may be served from batches that were ready.
    later_s = times_s[len(times_s) // 4 :]
    slow = [k for k, took_s in enumerate(later_s) if took_s > max(later_s) / 2]
    return later_s[slow[0] + 1 : slow[-1] + 1] if 1 < len(slow) <= len(later_s) // 2 else ()


def length_of(loader: Any) -> int:
    """Return the number of batches in a pass, or 0 if the loader does not report it."""
    try:
        return len(loader)
    except TypeError:  # no ``__len__``, or that of a DataLoader over an IterableDataset without one
        return 0


def _is_enough(calls: int, times_s: Sequence[float], elapsed_s: float) -> bool:
    """Return whether calls in immediate succession have reached a steady pace."""
    if calls >= _MOST_READY or elapsed_s >= _RATE_S:
        return True
    if len(times_s) < _CALLS or elapsed_s < _SHORT_S:
        return False
    # The pace is steady if the second quarter of the calls and the second half have similar means.
    quarter = len(times_s) // 4
    before = fmean(times_s[quarter : 2 * quarter])
    last = fmean(times_s[2 * quarter :])
    return abs(last - before) <= _PACE * last


@dataclass(frozen=True, slots=True)
class WindowTimer:
    """A timer of iterations that get the sampled batches cyclically.

    Attributes:
        pipe: The pipeline, which is idle and borrowed for profiling.
        batches: The sampled batches, in the order of the loop.
        copy: Returns the copy of a batch that an iteration gets. It is called before the
            iterations.
        warmup: Iterations before those that are timed; at least 1 for each batch, in which a
            shortcut task is cached.
        measure: Iterations that are timed, at least.
        pipelined: Whether iterations run under the plan, instead of serially.
        pulls: Called where an iteration gets its batch.
    """

    pipe: SWPipeline[Any]
    batches: Sequence[Any]
    copy: Callable[[Any], Any] | None
    warmup: int
    measure: int
    pipelined: bool
    pulls: Pulls = field(default_factory=Pulls)

    @property
    def cycle(self) -> int:
        """The number of iterations after which the batches repeat."""
        return len(self.batches)

    def whole_cycles(self, count: int) -> int:
        """Return ``count``, rounded up to whole cycles so that each batch comes equally often."""
        return -(-count // self.cycle) * self.cycle

    @property
    def num_warmup(self) -> int:
        """The number of iterations not timed, at the beginning and after each change of shortcuts.

        Under the plan, ``depth`` iterations may be in flight at a change, and threads that were
        ahead may stay ahead for one more. The time of the next iteration begins when that one is
        retired.
        """
        return max(self.warmup, self._least + self.cycle - 1)

    @property
    def _least(self) -> int:
        return self.pipe.plan.depth + 2 if self.pipelined else 1

    @property
    def num_unmeasured(self) -> int:
        """The number of batches pulled for a passage besides those of measured iterations."""
        return max(self.warmup, self._least) + self.pipe.plan.depth + 1

    def window(self) -> list[float]:
        """Return the seconds of each measured iteration of one run, in whole cycles."""
        run = self.run()
        measured = run.iterate(self.num_warmup, self.whole_cycles(self.measure))
        run.end()
        return run.seconds()[measured]

    def passage(self, count: int, cycle: int = 0) -> Passage:
        """Run ``count`` successive iterations of the loop, and time each task in each of them.

        The device time of a task is the time between two events, before and after its work. If the
        host queues work more slowly than the device executes it, this time includes idle time of
        the device: it is then close to the host time, and longer than the device is busy.

        ``cycle`` is the number of iterations after which the loop repeats; 0 for the number of
        batches.
        """
        observer = HostObserver(self.pipe.tasks)
        run = self.run()
        streams = self.pipe.device.has_streams
        tracing = self.pipe.trace() if streams else nullcontext(Trace(()))
        with tracing as trace, self.pipe.observe(observer):
            measured = run.iterate(max(self.warmup, self._least), count)
            run.end()
        seconds = run.seconds()[measured]
        steps_s = dict(zip(run.numbers[measured], seconds, strict=True))
        device_s: dict[str, dict[int, float]] = defaultdict(dict)
        for span in trace.spans:
            if span.row.kind == "stream" and span.iteration in steps_s:
                device_s[span.task][span.iteration] = span.duration_ns / 1e9
        tasks = times_of(observer.timed(steps_s, run.calls))
        return Passage(seconds, tasks, cycle or self.cycle, device_s)

    def run(self) -> TimedRun:
        """Begin a run of iterations."""
        return (TimedRun if self.pipelined else SerialRun)(self)


class Passage(NamedTuple):
    """The measurements of successive iterations of a loop.

    Attributes:
        steps_s: The time of each iteration, in order.
        tasks: Task to its times in these iterations.
        cycle: The number of iterations after which the batches repeat.
        device_s: Task to the seconds that its work took on its stream, by iteration number; empty
            without streams.
    """

    steps_s: Sequence[float]
    tasks: Mapping[str, ThreadTimes]
    cycle: int
    device_s: Mapping[str, Mapping[int, float]] = MappingProxyType({})

    def of_batch(self, place: int | None) -> dict[str, tuple[float, ...]]:
        """Return ``device_s`` of the iterations with the batch at ``place``; None for all."""
        return {
            task: tuple(s for n, s in sorted(each_s.items()) if place in (None, n % self.cycle))
            for task, each_s in self.device_s.items()
        }


class TimedRun:
    """A run of successive iterations under the plan, and the iterator over its batches.

    The iterator ends where no more batches were prepared. For each batch that is taken, the loader
    is called. Iteration i gets the batch i modulo their number, since a shortcut finds its cached
    outputs by that number.

    All ranks prepare the same numbers of batches, and more may be prepared after an end. Therefore
    the ranks must not agree on the end of the iterator, which they would take for the final one.

    Attributes:
        numbers: The numbers of the iterations that were retired, in that order.
    """

    # The engine reads this attribute: True means that it need not ask the other ranks for an end.
    agreed = True

    def __init__(self, timer: WindowTimer) -> None:
        self._timer = timer
        self._pipe = timer.pipe
        self._number = timer.pipe.next_iteration  # of the next batch to prepare
        self._prepared: deque[Any] = deque()
        self.numbers: list[int] = []
        self._marks: list[Any] = []  # the retirements: times, or events of the device
        self._called = 0  # calls of the loader before the iterations that were measured last

    def prepare(self, count: int) -> None:
        """Add ``count`` batches, copied now so that copying is not timed."""
        timer = self._timer
        for _ in range(count):
            batch = timer.batches[self._number % timer.cycle]
            self._number += 1
            self._prepared.append(batch if timer.copy is None else timer.copy(batch))

    def batches_left(self) -> int:
        """Return the number of batches before the next end."""
        return len(self._prepared)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._prepared:
            raise StopIteration
        self._timer.pulls()
        return self._prepared.popleft()

    def iterate(
        self,
        warmup: int,
        measure: int,
        begin_to_measure: Callable[[], object] = lambda: None,
    ) -> slice:
        """Run iterations, and return where the measured ones are in ``seconds`` and ``numbers``.

        The batches that the loader has ready are taken away first. ``begin_to_measure`` is called
        between the warm-up and the measured iterations, and should take no time.
        """
        pulls = self._timer.pulls
        if pulls.drains:
            # The first iteration with a new shortcut takes longer, because outputs are cached, and
            # the loader makes more batches meanwhile. So this iteration runs before the loader is
            # drained.
            self.prepare(self._ahead() + 1)
            self.numbers.append(self._next())
        # Under the plan, a worker thread may call the loader as well. The pipeline is drained
        # first, so that ``settle`` is its only caller.
        if pulls.has_loader:
            self.end()  # no iteration is in flight from here on
            pulls.settle(self._ahead() + warmup + measure)
        begin = len(self.numbers) + warmup
        self.prepare(self._ahead() + warmup + measure)
        for turn in range(warmup + measure):
            if turn == warmup:
                self._called = len(pulls.runs)
                begin_to_measure()
            self.numbers.append(self._next())
        return slice(begin, begin + measure)

    @property
    def calls(self) -> list[HostRun]:
        """The loader's calls in the iterations that were measured last."""
        return self._timer.pulls.runs[self._called :]

    def end(self) -> None:
        """Drain the pipeline without counting the iterations."""
        self._pipe.drain()

    def seconds(self) -> list[float]:
        """Return the seconds from each retirement to the next one. Call this after ``end``."""
        if not self._on_device:
            return [0.0, *(late - early for early, late in pairwise(self._marks))]
        self._pipe.device.synchronize()
        return [0.0, *(early.elapsed_time(late) / 1e3 for early, late in pairwise(self._marks))]

    @cached_property
    def _on_device(self) -> bool:
        return timed_event(self._pipe.device) is not None

    def _ahead(self) -> int:
        """Return how many more batches than one the next iteration takes, to fill the pipeline."""
        return 0 if self._pipe.in_flight else self._pipe.plan.depth - 1

    def _next(self) -> int:
        """Run one iteration and return its number."""
        number: int = self._pipe.progress(self).iter_idx
        # The caller's stream waits for the retired iteration, so an event there marks its end.
        if self._on_device:
            mark: Any = self._pipe.device.new_event(timing=True)
            mark.record(self._pipe.device.current_stream())
        else:
            mark = time.perf_counter()
        self._marks.append(mark)
        return number


class SerialRun(TimedRun):
    """A run of successive serial iterations, each timed on its own."""

    def __init__(self, timer: WindowTimer) -> None:
        super().__init__(timer)
        self._first = self._number
        self._seconds: list[float] = []

    def seconds(self) -> list[float]:
        return self._seconds

    def _ahead(self) -> int:
        return 0

    def _next(self) -> int:
        number = self._first + len(self._seconds)
        # The device must be idle at both ends, or its work would count for another iteration.
        wait = self._pipe.device.synchronize
        wait()
        begin_s = time.perf_counter()
        self._pipe.run_one_serial_iter(next(self), number)
        wait()
        self._seconds.append(time.perf_counter() - begin_s)
        return number
