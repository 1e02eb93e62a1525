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

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import sub
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from swpipe._distributed.rank_checks import gather, is_alone
from swpipe.core.effects import UNKNOWN, Effects
from swpipe.core.loaders import is_apart, unprepared
from swpipe.core.plan import PULL
from swpipe.pipeline import SWPipeline
from swpipe.profiler.figures import LoaderPace
from swpipe.profiler.host import HostRun, HostTimes, thread_times
from swpipe.trace import Trace
from swpipe.trace.recorder import timed_event

_LEAST_CALLS = 4
_CALLS = 32
"""Calls of a loader by which its rate is found: the least, and those that do if time allows."""

_RATE_S = 2.0
_SHORT_S = 0.02
"""Seconds after which the rate is taken as it is, and before which a queue may not be empty yet."""

_PACE = 0.25
"""Two parts of the calls may differ by so much in their means."""

_MOST_READY = 1024
"""More batches than any loader has ready."""

_TURNS = 8
"""With more workers, a visit is not as long as all of them take for one batch each."""

_LOOKS = 3
_MOST_LOOKS = 64
_LOOKS_S = 2.0
"""Calls after a rest of a batch's time, by which it is seen whether the loader works ahead."""

_RARE = 32
"""One call in so many may take longer than usual by chance."""

_LONGER = 0.1
"""The first call of a pass is longer than others by more than this part of them, or it is not."""

_START = 1e-4
"""Seconds of a step that the start of a pass takes, below which it is not measured again."""


class Pulls:
    """Calls a loader once per iteration, as training does.

    It is begun again at its end. A loader that works ahead, in processes or threads of its own, has
    batches ready after any time in which it is not called, or is called less often than it could
    be. A few iterations would be served from these, at a pace that no epoch keeps. So they are
    taken away before a visit (``settle``), and what the loader makes in the long run is measured
    once (``measure``)::

        burst of calls     |..|..|..|....60|....60|....60|   the batches that were ready; the rate
        before each visit  |..|..|..|....60|                 taken away until a call waits

    Attributes:
        effects: What its calls may touch.
        runs: The calls by iterations until now.
        rate_s: Seconds per batch in the long run, if nothing else is waited for; 0 if unknown.
        workers: How many processes of a DataLoader make batches; 0 if none.
        starts_workers: It starts them in each pass.
        drains: Whether ``settle`` may have something to take away.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self.effects = Effects() if is_apart(loader) else UNKNOWN
        self.runs: list[HostRun] = []
        self.rate_s = 0.0
        inner = unprepared(loader)
        is_torchs = isinstance(inner, DataLoader)
        self.workers: int = inner.num_workers if is_torchs else 0
        self.starts_workers = self.workers > 0 and not inner.persistent_workers
        self._ahead: bool | None = self.workers > 0 if is_torchs else None
        self._batches: Iterator[Any] | None = None
        self._taken = 0  # of this pass
        self._length = length_of(loader)
        self._starts_s: list[float] = []
        self._on = True
        self.drains = False
        self._usual_s = 0.0

    @classmethod
    def of(cls, loader: Iterable[Any] | Pulls | None) -> Pulls | None:
        """Calls of a loader; those that are given are shared, with what was measured of them."""
        return loader if loader is None or isinstance(loader, Pulls) else cls(loader)

    def __call__(self) -> None:
        """Pull a batch, and drop it.

        Raises:
            ValueError: There is none.
            BaseException: Whatever the loader raised.
        """
        if self._on:
            self.runs.append(self._timed()[1])

    def batches(self) -> Iterator[Any]:
        """The loader's batches, pass after pass."""
        while True:
            yield self._timed()[0]

    @property
    def works_ahead(self) -> bool:
        """Whether it makes batches while it is not called; known after the first visits."""
        return self._ahead is True

    @property
    def start_s(self) -> float:
        """What the start of a pass takes, divided by the steps of a pass; 0 if unknown.

        A first call that takes no longer than later ones now and then do, such as for a chunk of
        batches, is a call like any other.
        """
        if not self._starts_s or not self._length:
            return 0.0
        # The first one of all may start processes that stay.
        longer_s = fmean(self._starts_s[1:] or self._starts_s) - self._usual_s
        return longer_s / self._length if longer_s > _LONGER * self._usual_s else 0.0

    @property
    def length(self) -> int:
        """The batches of a pass; 0 if unknown."""
        return self._length

    @property
    def pace(self) -> LoaderPace:
        """What was measured of it."""
        return LoaderPace(
            self.rate_s, self.start_s, self.works_ahead, self.workers, self.starts_workers
        )

    def measure(self) -> None:
        """Measure the rate, the start of a pass, and whether it works ahead; forget the calls."""
        if not self.rate_s:
            self._measure_start()
            times_s: list[float] = []  # without those of passes that begin
            all_s: list[float] = []
            calls = 0
            begin_s = time.perf_counter()
            while not self.agreed(_is_enough(calls, times_s, time.perf_counter() - begin_s)):
                for _ in range(max(calls, _LEAST_CALLS)):
                    calls += 1
                    all_s.append(self._timed()[1].wall_s)
                    if self._taken > 1:
                        times_s.append(all_s[-1])
            # Batches that are read together come in one slow call and many quick ones.
            self._usual_s = sorted(times_s or [0.0])[-1 - len(times_s) // _RARE]
            last_s = times_s[len(times_s) // 2 :] or [0.0]
            periods_s = _from_slow_to_slow(times_s if self.start_s else all_s)
            self.rate_s = fmean(periods_s or last_s)
            if self._ahead is None:
                self._look(math.ceil(2 * max(last_s) / self.rate_s) if self.rate_s else 0)
            self.drains = not self.agreed(self._ahead is False or not self.rate_s)
        self.runs.clear()

    def in_turns(self, count: int) -> int:
        """So many calls or a few more: workers end their batches in turns of one each."""
        return -(-count // self.workers) * self.workers if 1 < self.workers <= _TURNS else count

    def settle(self, count: int, *, drain: bool) -> None:
        """Be ready for so many calls in a row: no pass ends within them, and no batch is ready."""
        if not self._on:
            return
        if drain and self.drains:
            self._drain()
        if self._length and count <= self._length < self._taken + count:
            self._begin_again()
            if drain and self.drains:
                self._drain()

    def _drain(self) -> None:
        """Take away what is ready."""
        for _ in range(_MOST_READY):
            if self.agreed(self._timed()[1].wall_s >= self.rate_s / 2):
                break

    def _look(self, calls: int) -> None:
        """See whether calls take less where the loader has time to make a batch before each."""
        most = max(_LOOKS, int(_LOOKS_S / self.rate_s)) if self.rate_s else _LOOKS
        took_s = []
        for _ in range(min(max(_LOOKS, calls), most, _MOST_LOOKS)):
            time.sleep(self.rate_s)
            took_s.append(self._timed()[1].wall_s)
        self._ahead = not self.agreed(fmean(took_s) > self.rate_s / 2)

    def _measure_start(self) -> None:
        """Begin another pass, if what its start takes may count."""
        begun_once = len(self._starts_s) == 1 and self._length > 0
        if self.agreed(begun_once and self._starts_s[0] > _START * self._length):
            self._begin_again()

    def _begin_again(self) -> None:
        self._batches = None  # its workers end
        self._timed()

    def _timed(self) -> tuple[Any, HostRun]:
        begin = thread_times()
        batch = self._next()
        return batch, HostRun(len(self.runs), *map(sub, thread_times(), begin))

    def _next(self) -> Any:
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
            self._length = self._taken
        raise ValueError(
            "the loader has no batch, or has ended and cannot be begun again: give a DataLoader "
            "or another object that makes a new iterator"
        )

    @staticmethod
    def agreed(own: bool) -> bool:
        """Whether it is so on all ranks: they take the same number of batches."""
        return own if is_alone() else all(gather(own))

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


def _from_slow_to_slow(times_s: Sequence[float]) -> Sequence[float]:
    """Return whole periods of calls of which few are slow, for all batches of a chunk."""
    later_s = times_s[len(times_s) // 4 :]
    slow = [k for k, took_s in enumerate(later_s) if took_s > max(later_s) / 2]
    return later_s[slow[0] + 1 : slow[-1] + 1] if 1 < len(slow) <= len(later_s) // 2 else ()


def length_of(loader: Any) -> int:
    """How many batches a pass has; 0 if it does not say."""
    try:
        return len(loader)
    except TypeError:  # none, or a DataLoader's over an IterableDataset that has none
        return 0


def _is_enough(calls: int, times_s: Sequence[float], elapsed_s: float) -> bool:
    """Whether calls one right after the other have come to the pace that they keep."""
    if calls < _LEAST_CALLS or calls >= _MOST_READY:
        return calls >= _MOST_READY
    if elapsed_s >= _RATE_S:
        return True
    if len(times_s) < _CALLS or elapsed_s < _SHORT_S:
        return False
    quarter = len(times_s) // 4
    before = fmean(times_s[quarter : 2 * quarter])
    last = fmean(times_s[2 * quarter :])
    return abs(last - before) <= _PACE * last


@dataclass(frozen=True, slots=True)
class WindowTimer:
    """Times iterations that get sampled batches, one after the other and again.

    Attributes:
        pipe: The pipeline; idle, and borrowed for profiling.
        batches: The sampled batches, in the order of the loop.
        copy: Makes the batches that iterations get from these, before the iterations.
        warmup: Iterations before those that are timed; at least 1 for each batch, in which a
            shortcut task is cached.
        pulls: Called where an iteration gets its batch; None for nothing.
    """

    pipe: SWPipeline[Any]
    batches: Sequence[Any]
    copy: Callable[[Any], Any] | None
    warmup: int
    measure: int
    pipelined: bool
    pulls: Pulls | None = None

    @property
    def cycle(self) -> int:
        """After how many iterations batches come again."""
        return len(self.batches)

    def whole_cycles(self, count: int) -> int:
        """Return so many iterations or a few more, in which each batch comes as often."""
        return -(-count // self.cycle) * self.cycle

    @property
    def num_warmup(self) -> int:
        """Iterations that are not timed, at the beginning and after each change of shortcuts.

        Under the plan, ``depth`` iterations may be in flight at a change, and threads that were
        ahead may stay ahead for one more. The time of the next one begins when that is retired.
        """
        return max(self.warmup, self._least + self.cycle - 1)

    @property
    def _least(self) -> int:
        return self.pipe.plan.depth + 2 if self.pipelined else 1

    @property
    def num_unmeasured(self) -> int:
        """Batches that the loader makes for a passage beyond those of measured iterations."""
        return max(self.warmup, self._least) + self.pipe.plan.depth + 1

    def window(self) -> list[float]:
        """Return the seconds of so many iterations as are measured, in whole cycles."""
        run = self.run()
        measured = run.iterate(self.num_warmup, self.whole_cycles(self.measure))
        run.end()
        return run.seconds()[measured]

    def passage(self, count: int, cycle: int = 0) -> Passage:
        """Go through the loop: so many successive iterations, each task timed in each.

        What a task's work takes on its stream is the time between two events, before and after it.
        If the host queues work more slowly than the device executes it, this includes idle time of
        the device: it is then close to the host time, and longer than the device is busy.

        ``cycle``: After how many it repeats, if that is not the number of batches.
        """
        times = HostTimes(task.name for task in self.pipe.tasks)
        run = self.run()
        seen = times.observer()
        called = 0

        def begin() -> None:
            nonlocal called
            called = 0 if self.pulls is None else len(self.pulls.runs)

        streams = self.pipe.device.has_streams
        tracing = self.pipe.trace() if streams else nullcontext(Trace(()))
        with tracing as trace, self.pipe.observe(seen):
            measured = run.iterate(max(self.warmup, self._least), count, begin)
            run.end()
        numbers = run.numbers[measured]
        times.add(seen, {*numbers})
        if self.pulls is not None:
            times.put_first(PULL, self.pulls.runs[called:][:count])
        device_s = _on_streams(trace, {*numbers})
        return Passage(run.seconds()[measured], times, cycle or self.cycle, device_s)

    def run(self) -> TimedRun:
        """Begin a run of iterations."""
        feed = _Feed(self.batches, self.copy, self.pulls, self.pipe.next_iteration)
        return (TimedRun if self.pipelined else SerialRun)(self.pipe, feed)

    def spans(self, seconds: Sequence[float]) -> list[float]:
        """Means of as many neighbouring iterations as the pipeline is deep."""
        span = min(self.pipe.plan.depth, len(seconds)) if self.pipelined else 1
        return [sum(seconds[i : i + span]) / span for i in range(len(seconds) - span + 1)]


class Passage(NamedTuple):
    """Successive iterations of a loop.

    Attributes:
        steps_s: The time of each, in their order.
        times: What each task took in each.
        cycle: After how many the batches came again.
        device_s: Task to what its work took on its stream, by the iteration's number; empty without
            streams.
    """

    steps_s: Sequence[float]
    times: HostTimes
    cycle: int
    device_s: Mapping[str, Mapping[int, float]] = MappingProxyType({})

    def of_batch(self, place: int) -> dict[str, dict[int, float]]:
        """Return ``device_s`` of the iterations with one of the batches."""
        return {
            task: {n: s for n, s in each_s.items() if n % self.cycle == place}
            for task, each_s in self.device_s.items()
        }


def _on_streams(trace: Trace, numbers: Container[int]) -> dict[str, dict[int, float]]:
    """Return the seconds of each task's work on its stream in these iterations, by number."""
    each_s: dict[str, dict[int, float]] = defaultdict(dict)
    for span in trace.spans:
        if span.row.kind == "stream" and span.iteration in numbers:
            each_s[span.task][span.iteration] = span.duration_ns / 1e9
    return {task: dict(sorted(of.items())) for task, of in each_s.items()}


class _Feed:
    """The batches of a run: an iterator that has as many as were asked for ahead.

    ``pulls`` is called for each that is taken. Iteration i gets batch i modulo their number, from
    the iteration ``first`` on: by that number a shortcut knows what belongs to it.

    All ranks ask for the same numbers of batches, and there are more after an end. So the ranks
    must not agree on its end, which they would take for the last one.
    """

    agreed = True

    def __init__(
        self,
        batches: Sequence[Any],
        copy: Callable[[Any], Any] | None,
        pulls: Pulls | None = None,
        first: int = 0,
    ) -> None:
        self._batches = batches
        self._copy = copy
        self.pulls = pulls
        self._number = first
        self._ahead: deque[Any] = deque()

    def prepare(self, count: int) -> None:
        """Have so many more batches."""
        for _ in range(count):
            batch = self._batches[self._number % len(self._batches)]
            self._number += 1
            self._ahead.append(batch if self._copy is None else self._copy(batch))

    def batches_left(self) -> int:
        """Return how many batches there are before the next end."""
        return len(self._ahead)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._ahead:
            raise StopIteration
        if self.pulls is not None:
            self.pulls()
        return self._ahead.popleft()


class TimedRun:
    """Iterations in a row under the plan; each that is counted is one that was retired.

    Attributes:
        numbers: Those of the iterations.
    """

    def __init__(self, pipe: SWPipeline[Any], feed: _Feed) -> None:
        self._pipe = pipe
        self._feed = feed
        self.numbers: list[int] = []
        self._marks: list[Any] = []  # when each was retired

    def iterate(
        self,
        warmup: int,
        measure: int,
        begin_to_measure: Callable[[], object] = lambda: None,
        *,
        drain: bool = True,
    ) -> slice:
        """Run iterations; returns where the measured ones are in ``seconds`` and ``numbers``.

        ``begin_to_measure`` is called between the two kinds, and should take no time. ``drain``:
        take the batches that the loader has ready first.
        """
        pulls = self._feed.pulls
        if pulls is not None and drain and pulls.drains:
            # A shortcut is cached in an iteration that is longer: the loader makes more meanwhile.
            self._feed.prepare(self._ahead() + 1)
            self.numbers.append(self._next())
        if pulls is not None:
            self.end()  # a thread of the plan's calls the loader, too
            pulls.settle(self._ahead() + warmup + measure, drain=drain)
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
