"""Measure in rounds: one run of iterations each, in which shortcuts change every few iterations.

    round 1    base   read   decode   copy   base   forward   backward   step   base | restored
    round 2    base   step   decode   read   base   backward   copy   forward   base | restored
    ...

Each is a visit: some iterations that are not timed, in which the shortcut is cached and the
pipeline comes to its steady state, and then some that are. How many varies by one, so that visits
do not keep step with what comes every so many iterations. Orders and lengths are the same in every
run, and so on every rank. ``swpipe.profiler.spread`` says how visits are compared.

A visit goes through the sampled batches once or several times, in their order, and in each round
all visits go through the same ones. A replay leaves what the task made of the batch at hand.

In all visits each task is timed on its thread too. While one is shortcut, its own time is that of
the replay, and that of others shows what it costs them: a forward takes part of the backward along.
``swpipe.profiler.exposures`` says what follows.

Each round starts from the same state, since a shortcut replays the same outputs in each iteration,
which can lead training astray. On several ranks the pipeline is empty at each change: otherwise one
rank might replay a collective that another one runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from swpipe._distributed.rank_checks import gather, is_alone
from swpipe.core.plan import PULL
from swpipe.errors import UnsavedStateError, add_note
from swpipe.profiler.exposures import BASE, Exposures, Kind, Round, differences_in
from swpipe.profiler.host import HostObserver, HostRun
from swpipe.profiler.measure import Passage, Pulls, TimedRun, WindowTimer
from swpipe.profiler.other_load import OtherLoad, load_so_far
from swpipe.profiler.spread import time_saved

BETWEEN = 3
"""How many visits with a shortcut there are between two without.

With 1, half of the time goes into visits without; with more, the line between these says less about
the visits in the middle. On recorded times of iterations, 2 to 4 had the smallest errors.
"""

ENOUGH = 5
"""From so many rounds on, a spread is known well enough to choose by it."""

_MARGIN = 1.25
"""A loader whose batches come faster than iterations by so much is never waited for."""

LEAST_ROUNDS = 2
MAX_ROUNDS = 200
"""The end of a search for a spread that is not reached."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How much to measure.

    Attributes:
        num_rounds: How many rounds, if there is neither of the next two.
        seconds: Rounds until so long has passed.
        target_spread_s: Rounds until all intervals are so narrow, or ``seconds`` have passed.

    Raises:
        ValueError: A number is too small.
    """

    num_warmup: int
    num_measure: int
    num_rounds: int = LEAST_ROUNDS
    seconds: float | None = None
    target_spread_s: float | None = None

    def __post_init__(self) -> None:
        least = {"num_warmup": 0, "num_measure": 1, "num_rounds": LEAST_ROUNDS}
        for name, number in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < number:
                raise ValueError(f"{name} is {value!r}: give a whole number, {number} or more")
        for name in ("seconds", "target_spread_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}: give a number greater than 0")

    @property
    def fixed(self) -> bool:
        """Whether the number of rounds is known beforehand."""
        return self.seconds is None and self.target_spread_s is None


class Rounds:
    """The visits that were measured so far.

    Attributes:
        timer: Runs the iterations.
        base_s: The mean time of an iteration without a shortcut, round by round.
        saved_s: Kind to the differences that ``time_saved`` takes.
        seen: The rounds that are whole.
        in_backward_s: Kind to what its replays cost in the backward of others, visit by visit.
        failed: Kind to why it could not be measured; it is in none of the others.
        interrupted: Ctrl-C came before the last round.
        other_load: What other processes used of the machine; None where it does not tell.

    Args:
        restore: Called after each round.
        sections: Turn, from 0, to the batches that the visits of a round go through.
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
        self._rng = random.Random(0)
        self._kind = BASE
        self.base_s: list[float] = []
        self.saved_s: dict[Kind, list[float]] = {}
        self.seen: list[Round] = []
        self.in_backward_s: dict[Kind, list[float]] = {}
        self._called: list[list[HostRun]] = []  # of the run, visit by visit
        self._rest_s: dict[Kind, float] = {}  # of an iteration, less the call of the loader
        self.failed: dict[Kind, Exception] = {}
        self.interrupted = False
        self.other_load: OtherLoad | None = None

    def exposures(self, place: int | None = None, passage: Passage | None = None) -> Exposures:
        """Return what the rounds show: of all batches, or of the one at a place in the cycle."""
        timer = self.timer
        pulls = self.timer.pulls
        return Exposures(
            self.seen,
            [*self.saved_s],
            adds_up=not (timer.pipelined or timer.pipe.device.has_streams),
            counts_pulls=pulls is not None and not pulls.works_ahead,
            cycle=timer.cycle,
            place=place,
            passage=passage,
        )

    # ------------------------------------------------------------------------------- measuring

    def warm_up(self) -> None:
        """Iterations that do not count: the first ones allocate and compile."""
        self._run(visits(()))
        if self.timer.pulls is not None:
            self.timer.pulls.measure()

    def measure(self, kinds: Sequence[Kind], tick: Callable[[], object] = lambda: None) -> None:
        """Measure kinds of shortcuts; call ``tick`` after each visit.

        One with which iterations fail, and only with it, is left out from there on. On several
        ranks it fails the profile: the others may wait in a collective.

        Raises:
            BaseException: Whatever a task raised, with a note of what was being measured.
                KeyboardInterrupt only in the first two rounds.
        """
        self.saved_s = {kind: [] for kind in kinds}
        begin_s = time.perf_counter()
        load = load_so_far()
        while wanted := self._agreed(self._wanted(time.perf_counter() - begin_s)):
            order = self._rng.sample(wanted, len(wanted))
            try:
                self._measure_round(order, tick)
            except KeyboardInterrupt:
                if len(self.base_s) < LEAST_ROUNDS:
                    raise
                self.interrupted = True
                break
        while len(self.base_s) < LEAST_ROUNDS:  # no kind could be measured
            self._measure_round((), tick)
        self.other_load = None if load is None else load.others()

    def _wanted(self, elapsed_s: float) -> list[Kind]:
        """The kinds for the next round; none at the end."""
        counts = self._counts
        done = len(self.base_s)
        kinds = list(self.saved_s)
        if done < LEAST_ROUNDS:
            return kinds
        if counts.fixed:
            return kinds if done < counts.num_rounds else []
        in_time = counts.seconds is None or elapsed_s * (1 + 1 / done) <= counts.seconds
        if not in_time or done == MAX_ROUNDS:
            return []
        if done < ENOUGH:
            return kinds
        found = time_saved(self.saved_s)
        widest = sorted(kinds, key=lambda kind: -found[kind].spread_s)
        if counts.target_spread_s is not None:
            return [kind for kind in widest if found[kind].spread_s > counts.target_spread_s]
        return widest[: -(-len(widest) // 2)]

    def _agreed(self, wanted: list[Kind]) -> list[Kind]:
        """What rank 0 wants; times differ."""
        return wanted if self._counts.fixed or is_alone() else gather(wanted)[0]

    def _measure_round(self, order: Sequence[Kind], tick: Callable[[], object]) -> None:
        if self._sections is not None:
            self.timer = replace(self.timer, batches=self._sections(len(self.seen)))
        while True:
            try:
                found = self._run(visits([kind for kind in order if kind in self.saved_s]), tick)
            except UnsavedStateError:
                raise
            except Exception as error:
                if self._kind == BASE or not is_alone():
                    raise
                self._leave_out(self._kind, error)
                continue
            taken = [(kind, [*took_s.values()]) for kind, took_s in found.visits]
            self.base_s.append(fmean(fmean(took_s) for kind, took_s in taken if kind == BASE))
            for kind, saved_s in differences_in(taken).items():
                self.saved_s[kind].append(saved_s)
            self.seen.append(found)
            return

    def _leave_out(self, failed: Kind, error: Exception) -> None:
        """Leave out a kind, if the shortcut was the reason."""
        self._run(visits(()))  # otherwise, this raises
        self.failed[failed] = error
        del self.saved_s[failed]

    def _run(self, order: Sequence[Kind], tick: Callable[[], object] = lambda: None) -> Round:
        where: list[slice] = []
        called = self._called = list[list[HostRun]]()
        pipe = self.timer.pipe
        pipe.cycle_shortcuts(self.timer.cycle)
        run = self.timer.run()
        seen = HostObserver(task.name for task in pipe.tasks)
        try:
            with pipe.observe(seen):
                for kind in order:
                    where.append(self._visit(run, kind))
                    if kind != BASE:
                        tick()
                run.end()
        except BaseException:
            with suppress(Exception):  # the first failure is the one to raise
                run.end()
            raise
        finally:
            self._restore()
        seconds = run.seconds()
        pulls: dict[int, HostRun] = {}
        taken = []
        for place, (kind, measured) in enumerate(zip(order, where, strict=True)):
            numbers = run.numbers[measured]
            took_s = seconds[measured]
            taken.append((kind, dict(zip(numbers, took_s, strict=True))))
            calls = called[place] if called else []
            if calls and not self.timer.pipelined:
                self._rest_s[kind] = fmean(took_s) - fmean(each.wall_s for each in calls)
            # Under a plan the loader is called for iterations that are handed out later.
            by_number = zip(numbers, calls, strict=False)
            pulls |= {number: call._replace(iteration=number) for number, call in by_number}
        return Round(seen, taken, pulls)

    def _visit(self, run: TimedRun, kind: Kind) -> slice:
        timer = self.timer
        self._kind = kind
        pulls = self.timer.pulls
        length = max(timer.pipe.plan.depth if timer.pipelined else 1, timer.measure)
        if timer.cycle > 1:
            length = timer.whole_cycles(length)
        elif length > 1:
            length += self._rng.choice((-1, 0, 1))
        drain = pulls is not None and kind != PULL and self._is_slow(pulls, kind)
        if drain and pulls is not None:
            length = pulls.in_turns(length)
        replayed = [kind] if kind not in (BASE, PULL) else []
        extra_s = 0.0
        called = 0

        def begin_to_measure() -> None:
            nonlocal extra_s, called
            called = 0 if pulls is None else len(pulls.runs)
            extra_s = -timer.pipe.replay_in_backward_s(*replayed)

        try:
            with self._shortcut(kind):
                measured = run.iterate(timer.num_warmup, length, begin_to_measure, drain=drain)
                extra_s += timer.pipe.replay_in_backward_s(*replayed)
                self.in_backward_s.setdefault(kind, []).append(extra_s / length)
                if not is_alone():
                    run.end()
                timer.pipe.check_shortcuts()
                if pulls is not None:
                    self._called.append(pulls.runs[called:])
                return measured
        except BaseException as error:
            said = {BASE: "without a shortcut", PULL: "with the loader not called"}
            what = said.get(kind, f"with task {kind!r} shortcut")
            add_note(error, f"swpipe: while profiling {what}")
            raise

    def _is_slow(self, pulls: Pulls, kind: Kind) -> bool:
        """Whether the rest of an iteration may be done before the loader has a batch.

        A loader that is faster fills its queue, and keeps it full.
        """
        return not pulls.agreed(pulls.rate_s * _MARGIN <= self._rest_s.get(kind, 0.0))

    def _shortcut(self, kind: Kind) -> AbstractContextManager[object]:
        if kind == PULL and self.timer.pulls is not None:
            return self.timer.pulls.off()
        return nullcontext() if kind == BASE else self.timer.pipe.shortcut(kind)


def visits(order: Sequence[Kind]) -> list[Kind]:
    """The visits of a round to these kinds: ``BASE`` first, last, and after every ``BETWEEN``."""
    groups = [order[i : i + BETWEEN] for i in range(0, len(order), BETWEEN)]
    return [BASE, *(kind for group in groups or [()] for kind in (*group, BASE))]
