"""Slopes: what an iteration gains or loses if a task takes a little less or more time.

Exposed time says what a task costs in all; a slope says what the next millisecond of it costs. A
task may be hidden now, and set the pace once it is 20% slower. Slopes need no shortcut, so they
are there for every task.

    slower    each run of the task is followed by a delay on its thread
    faster    each other thread is delayed by as much once per iteration, and the delay is taken
              off the iteration: relative to the others, the task has become faster

Both are visits as in ``swpipe.profiler.rounds``. A delay sleeps: it occupies the thread, but
no core and not the interpreter lock. So the slope of a task whose cost is to hold these is too
small.

Source: C. Curtsinger and E. D. Berger, "Coz: finding code that counts with causal profiling"
(SOSP 2015), which calls the second one a virtual speedup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from swpipe._engine.observers import Observer
from swpipe._engine.program import Instruction
from swpipe.core.plan import PipelinePlan
from swpipe.core.tables import table
from swpipe.pipeline import SWPipeline
from swpipe.profiler.diff import ms
from swpipe.profiler.measure import WindowTimer
from swpipe.profiler.rounds import Counts, Kind, Rounds
from swpipe.profiler.spread import Estimate, time_saved
from swpipe.profiler.trial_state import trial_state

LEAST_S = 1e-4
"""The shortest delay: a sleep is not much more exact than that."""


@dataclass(frozen=True, slots=True)
class Slope:
    """What a change of a task's time does to an iteration.

    Attributes:
        task: The task.
        host_s: Its time on its thread, in seconds.
        delay_s: By how much it was made slower and faster.
        slower: How much longer an iteration gets per second that the task takes longer, with the
            half-width of the 95% interval; 0 if other work hides it, 1 if nothing does.
        faster: How much shorter an iteration gets per second that the task takes less.
    """

    task: str
    host_s: float
    delay_s: float
    slower: Estimate
    faster: Estimate

    def costs_s(self, change: float) -> float:
        """How much longer an iteration gets if the task takes ``change`` more of its time.

        Args:
            change: 0.2 for 20% slower, -0.5 for half as long. The slope need not hold so far.
        """
        slope = self.slower if change > 0 else self.faster
        return slope.value_s * change * self.host_s


@dataclass(frozen=True, slots=True)
class Slopes:
    """The slopes of a plan's tasks, and the iteration that they were measured on, in seconds."""

    step_s: float
    slopes: tuple[Slope, ...]

    def __getitem__(self, task: str) -> Slope:
        return {slope.task: slope for slope in self.slopes}[task]

    def format(self) -> str:
        """A row per task: both slopes, 20% slower, and half as long."""
        rows = [
            (
                slope.task,
                ms(slope.host_s),
                *(f"{of.value_s:.2f} ± {of.spread_s:.2f}" for of in (slope.slower, slope.faster)),
                *(f"{1e3 * slope.costs_s(change):+.3f}" for change in (0.2, -0.5)),
            )
            for slope in self.slopes
        ]
        titles = ("task", "host ms", "slower", "faster", "20% slower ms", "half as long ms")
        return "\n".join(
            [
                f"{ms(self.step_s)} ms per iteration",
                table(titles, rows),
                "slower, faster: milliseconds of an iteration per millisecond of the task",
            ]
        )

    def __str__(self) -> str:
        return self.format()


def measure_slopes(
    pipe: SWPipeline[Any],
    batch: Any,
    share: float = 0.2,
    num_warmup: int = 2,
    num_measure: int = 3,
    num_rounds: int = 4,
    *,
    seconds: float | None = None,
    state: Any = None,
    copy: Callable[[Any], Any] | None = None,
) -> Slopes:
    """Measure the slopes of all tasks under the plan, and restore all state afterwards.

    Args:
        pipe: The pipeline; idle. Under torch.distributed, call this on all ranks.
        batch: Every iteration gets it.
        share: By which part of its time a task is made slower and faster; at least ``LEAST_S``.
        num_warmup: As for ``TaskProfiler``, like the next three.
        num_measure: Iterations timed per visit.
        num_rounds: Visits per task and direction.
        seconds: Measure for about so long in each direction instead.
        state: What to restore, as for ``TaskProfiler``.
        copy: Makes a batch that may be modified, for tasks that modify it in place.

    Raises:
        ValueError: A number is too small.
        RuntimeError: The pipeline is closed, or iterations are in flight.
        BaseException: Whatever a task raised.
    """
    if not share > 0:
        raise ValueError(f"share is {share!r}: give a number greater than 0, as 0.2")
    counts = Counts(num_warmup, num_measure, num_rounds, seconds)
    pipe.check_idle("measuring slopes")
    saved = trial_state(pipe, batch, state, copy)
    timer = WindowTimer(pipe, batch, copy, num_warmup, num_measure, True)
    names = [task.name for task in pipe.tasks]
    kinds: list[Kind] = [(name,) for name in names]
    delays = _Delays(pipe)
    with saved.trial(), pipe.borrow():
        _, times = Rounds(timer, counts, saved.restore_training).warm_up()
        delays.seconds = {name: max(LEAST_S, share * times.host_s[name]) for name in names}
        slower = Rounds(timer, counts, saved.restore_training, delays.slower)
        slower.measure(kinds, lambda: None)
        faster = Rounds(timer, counts, saved.restore_training, delays.faster)
        faster.measure(kinds, lambda: None)
    longer, shorter = time_saved(slower.saved_s), time_saved(faster.saved_s)
    host_s = slower.times[()].host_s
    return Slopes(
        fmean((*slower.base_s, *faster.base_s)),
        tuple(
            Slope(
                name,
                host_s[name],
                delay_s := delays.took_s(name),
                _per(delay_s, -longer[name,].value_s, longer[name,].spread_s),
                _per(delay_s, shorter[name,].value_s + delay_s, shorter[name,].spread_s),
            )
            for name in names
        ),
    )


def _per(delay_s: float, changed_s: float, spread_s: float) -> Estimate:
    return Estimate(changed_s / delay_s, spread_s / delay_s)


class _Delays:
    """Delays tasks, and knows how long the delays really were."""

    def __init__(self, pipe: SWPipeline[Any]) -> None:
        self._pipe = pipe
        self._took_s: dict[str, list[float]] = {task.name: [] for task in pipe.tasks}
        self.seconds: Mapping[str, float] = {}

    def took_s(self, name: str) -> float:
        """The mean delay."""
        return fmean(self._took_s[name])

    @contextmanager
    def slower(self, kind: Kind) -> Iterator[None]:
        """Delay the task itself."""
        with self._pipe.observe(_Delay(kind, self.seconds[kind[0]], self._took_s[kind[0]])):
            yield

    @contextmanager
    def faster(self, kind: Kind) -> Iterator[None]:
        """Delay one task of every other thread group, and the iteration if there is none."""
        (name,) = kind
        others = one_of_each_other_group(self._pipe.plan, name)
        with self._pipe.observe(_Delay(others, self.seconds[name], self._took_s[name])):
            yield


class _Delay(Observer):
    """Sleeps after each run of some tasks, on their threads."""

    def __init__(self, tasks: Collection[str], seconds: float, took_s: list[float]) -> None:
        self._tasks = frozenset(tasks)
        self._seconds = seconds
        self._took_s = took_s

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        if ins.task in self._tasks:
            begin_s = time.perf_counter()
            time.sleep(self._seconds)
            self._took_s.append(time.perf_counter() - begin_s)


def one_of_each_other_group(plan: PipelinePlan, task: str) -> tuple[str, ...]:
    """The first task of each thread group that ``task`` is not in."""
    first: dict[str, str] = {}
    for name, place in plan.schedule.items():
        first.setdefault(place.thread_group, name)
    return tuple(name for group, name in first.items() if group != plan.schedule[task].thread_group)
