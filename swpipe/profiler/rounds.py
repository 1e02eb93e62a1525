"""Rounds of measurements: runs of iterations in which the shortcut changes every few iterations.

    round 1    base   read   decode   copy   base   forward   backward   step   base | restored
    round 2    base   step   decode   read   base   backward   copy   forward   base | restored
    ...

Each entry is a visit. A visit begins with iterations that are not timed, in which the outputs of
the shortcut task are cached and the pipeline reaches its steady state; timed iterations follow.
Their number varies by one, so that visits do not stay in step with events that recur at a fixed
number of iterations. Orders and lengths are the same in every run, and so on every rank.
``swpipe.profiler.spread`` says how visits are compared.

A visit goes through the sampled batches once or several times, in their order. All visits of a
round go through the same batches. A replay restores the outputs that belong to the current batch.

In all visits, each task is timed on its thread too. While a task is shortcut, its own time is that
of the replay, and the times of other tasks show its effect on them: without the forward, the
backward has less to do. ``swpipe.profiler.exposures`` says what follows from these times.

Each round starts from the same state, since a shortcut replays the same outputs in each iteration,
which can make training diverge. On several ranks, the pipeline is drained at each change of the
shortcut. Otherwise, one rank might replay a collective that another rank runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from swpipe._distributed.rank_checks import gather, is_alone
from swpipe.core.plan import PULL
from swpipe.errors import UnsavedStateError, add_note
from swpipe.profiler.host import HostObserver, HostRun, TimedIteration
from swpipe.profiler.measure import TimedRun, WindowTimer
from swpipe.profiler.other_load import OtherLoad, load_so_far
from swpipe.profiler.spread import BASE, Kind, differences_in, time_saved

BETWEEN = 3
"""The number of visits with a shortcut between two visits without one.

With 1, visits without a shortcut take half of the time. With more, the line between these says
less about the visits in the middle. On recorded iteration times, 2 to 4 had the smallest errors.
"""

ENOUGH = 5
"""From this many rounds on, a spread is known well enough to select kinds by it."""

LEAST_ROUNDS = 2
MAX_ROUNDS = 200
"""The number of rounds after which the search for a spread ends, even if it is not reached."""


class Visit(NamedTuple):
    """The timed iterations of a visit."""

    kind: Kind
    iterations: Sequence[TimedIteration]


@dataclass(frozen=True, slots=True)
class Counts:
    """The amount of measuring.

    Attributes:
        num_warmup: Iterations before each visit that are not timed.
        num_measure: Iterations timed in each visit.
        num_rounds: Number of rounds, unless one of the next two attributes is given.
        seconds: Measure rounds until this time has passed.
        target_spread_ms: Measure rounds until all intervals are this narrow, or ``seconds`` have
            passed.

    Raises:
        ValueError: A number is too small.
    """

    num_warmup: int
    num_measure: int
    num_rounds: int = LEAST_ROUNDS
    seconds: float | None = None
    target_spread_ms: float | None = None

    def __post_init__(self) -> None:
        least = {"num_warmup": 0, "num_measure": 1, "num_rounds": LEAST_ROUNDS}
        for name, number in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < number:
                raise ValueError(f"{name} is {value!r}: give a whole number, {number} or more")
        for name in ("seconds", "target_spread_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}: give a number greater than 0")

    @property
    def fixed(self) -> bool:
        """Whether the number of rounds is known beforehand."""
        return self.seconds is None and self.target_spread_ms is None


class Rounds:
    """The rounds of visits, with what was measured so far.

    Attributes:
        timer: Runs the iterations.
        saved_s: Kind to the differences that ``time_saved`` takes.
        completed: The visits of the rounds that were completed.
        in_backward_s: Kind to the time of its replays in the backward of other tasks, visit by
            visit.
        failed: Kind to the exception for which it was left out of the other attributes.
        interrupted: Whether Ctrl-C came before the last round.
        other_load: The load of other processes; None if the machine does not report it.

    Args:
        restore: Called after each round.
        sections: Round number, from 0, to the batches that the visits of that round go through.
    """

    def __init__(
        self,
        timer: WindowTimer,
        counts: Counts,
        restore: Callable[[], object],
        sections: Callable[[int], Sequence[Any]] | None = None,
    ) -> None:
        self.timer = timer
        self._counts = counts
        self._restore = restore
        self._sections = sections
        # The seed is fixed, so that all ranks visit the kinds in the same order.
        self._rng = random.Random(0)
        self._kind = BASE
        self.saved_s: dict[Kind, list[float]] = {}
        self.completed: list[list[Visit]] = []
        self.in_backward_s: dict[Kind, list[float]] = {}
        self.failed: dict[Kind, Exception] = {}
        self.interrupted = False
        self.other_load: OtherLoad | None = None

    # ------------------------------------------------------------------------------- measuring

    def warm_up(self) -> None:
        """Run iterations that are not timed: the first ones allocate and compile."""
        self._run(visits(()))
        self.timer.pulls.measure()

    def measure(self, kinds: Sequence[Kind], tick: Callable[[], object]) -> None:
        """Measure kinds of shortcuts; call ``tick`` after each visit.

        If iterations fail only with one kind of shortcut, that kind is left out from then on. On
        several ranks, the profile fails instead, since other ranks may wait in a collective.

        Raises:
            BaseException: Any exception of a task, with a note of what was being measured.
                KeyboardInterrupt only in the first two rounds.
        """
        self.saved_s = {kind: [] for kind in kinds}
        begin_s = time.perf_counter()
        load = load_so_far()
        # Clocks differ between ranks, so all of them follow rank 0.
        while wanted := self._agreed(self._wanted(time.perf_counter() - begin_s)):
            order = self._rng.sample(wanted, len(wanted))
            try:
                self._measure_round(order, tick)
            except KeyboardInterrupt:
                # Intervals need two rounds. From then on, an interrupted profile has a result.
                if len(self.completed) < LEAST_ROUNDS:
                    raise
                self.interrupted = True
                break
        while len(self.completed) < LEAST_ROUNDS:  # no kind could be measured
            self._measure_round((), tick)
        self.other_load = load and load.others()

    def _wanted(self, elapsed_s: float) -> list[Kind]:
        """Return the kinds to measure in the next round; empty when measuring is done."""
        counts = self._counts
        done = len(self.completed)
        kinds = list(self.saved_s)
        if done < LEAST_ROUNDS:
            return kinds
        if counts.fixed:
            return kinds if done < counts.num_rounds else []
        # Another round is started only if it ends in time, judging by the mean of the rounds so
        # far.
        in_time = counts.seconds is None or elapsed_s * (1 + 1 / done) <= counts.seconds
        if not in_time or done == MAX_ROUNDS:
            return []
        if done < ENOUGH:
            return kinds
        # From ``ENOUGH`` rounds on, time goes where intervals are widest: to the kinds above the
        # target, or else to the wider half.
        saved = time_saved(self.saved_s)
        widest = sorted(kinds, key=lambda kind: -saved[kind].spread_s)
        if counts.target_spread_ms is not None:
            return [kind for kind in widest if 1e3 * saved[kind].spread_s > counts.target_spread_ms]
        return widest[: -(-len(widest) // 2)]

    def _agreed(self, wanted: list[Kind]) -> list[Kind]:
        """Return the kinds that rank 0 wants, because ranks measure different times."""
        return wanted if self._counts.fixed else gather(wanted)[0]

    def _measure_round(self, order: Sequence[Kind], tick: Callable[[], object]) -> None:
        if self._sections is not None:
            self.timer = replace(self.timer, batches=self._sections(len(self.completed)))
        # The round is repeated without each kind that fails, until all of its visits succeed.
        while True:
            try:
                timed = self._run(visits([kind for kind in order if kind in self.saved_s]), tick)
            except UnsavedStateError:
                # If state cannot be restored, that is an error of the user's call, whichever task
                # is shortcut.
                raise
            except Exception as error:
                failed = self._kind
                if failed == BASE or not is_alone():
                    raise
                self._run(visits(()))  # raises if the shortcut is not the reason
                self.failed[failed] = error
                del self.saved_s[failed]
                continue
            steps_s = [(kind, [each.step_s for each in every]) for kind, every in timed]
            for kind, saved_s in differences_in(steps_s).items():
                self.saved_s[kind].append(saved_s)
            self.completed.append(timed)
            return

    def _run(self, order: Sequence[Kind], tick: Callable[[], object] = lambda: None) -> list[Visit]:
        visited: list[tuple[slice, list[HostRun]]] = []
        pipe = self.timer.pipe
        # From here on, a shortcut caches one set of outputs for each batch of the cycle.
        pipe.cycle_shortcuts(self.timer.cycle)
        run = self.timer.run()
        observer = HostObserver(pipe.tasks)
        try:
            with pipe.observe(observer):
                for kind in order:
                    visited.append(self._visit(run, kind))
                    if kind != BASE:
                        tick()
                run.end()
        except BaseException:
            with suppress(Exception):  # the first failure is raised, not a later one
                run.end()
            raise
        finally:
            # The state is restored also after a failure: the round may be repeated from it.
            self._restore()
        seconds = run.seconds()
        timed = []
        for kind, (measured, calls) in zip(order, visited, strict=True):
            steps_s = dict(zip(run.numbers[measured], seconds[measured], strict=True))
            timed.append(Visit(kind, observer.timed(steps_s, calls)))
        return timed

    def _visit(self, run: TimedRun, kind: Kind) -> tuple[slice, list[HostRun]]:
        """Run a visit, and return where its iterations are in the run, and the loader's calls."""
        timer = self.timer
        self._kind = kind
        pulls = timer.pulls
        length = max(timer.pipe.plan.depth if timer.pipelined else 1, timer.measure)
        # A visit over several batches runs whole cycles. Otherwise the length varies at random, so
        # that visits do not stay in step with periodic events.
        if timer.cycle > 1:
            length = timer.whole_cycles(length)
        elif length > 1:
            length += self._rng.choice((-1, 0, 1))
        length = pulls.in_turns(length)
        replayed = [kind] if kind not in (BASE, PULL) else []
        extra_s = 0.0

        def begin_to_measure() -> None:
            nonlocal extra_s
            # ``replay_in_backward_s`` is a running total, so the time of this visit is the
            # difference.
            extra_s = -timer.pipe.replay_in_backward_s(*replayed)

        try:
            with self._shortcut(kind):
                measured = run.iterate(timer.num_warmup, length, begin_to_measure)
                extra_s += timer.pipe.replay_in_backward_s(*replayed)
                self.in_backward_s.setdefault(kind, []).append(extra_s / length)
                # Drain before the shortcut changes: another rank might still run the collective
                # that this rank would then replay.
                if not is_alone():
                    run.end()
                timer.pipe.check_shortcuts()
                return measured, run.calls
        except BaseException as error:
            what = {BASE: "without a shortcut", PULL: "with the loader not called"}
            shortcut = f"with task {kind!r} shortcut"
            add_note(error, f"swpipe: while profiling {what.get(kind, shortcut)}")
            raise

    def _shortcut(self, kind: Kind) -> AbstractContextManager[object]:
        if kind == PULL:
            return self.timer.pulls.off()
        return nullcontext() if kind == BASE else self.timer.pipe.shortcut(kind)


def visits(order: Sequence[Kind]) -> list[Kind]:
    """Return the visits of a round: ``BASE`` first, last, and after every ``BETWEEN`` kinds."""
    groups = [order[i : i + BETWEEN] for i in range(0, len(order), BETWEEN)]
    return [BASE, *(kind for group in groups or [()] for kind in (*group, BASE))]
