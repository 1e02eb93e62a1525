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
Serially times add up::

    iteration  | read | decode | forward | backward | gaps |
    exposed(forward) = forward + what the others take less + what the gaps take less

So what others take longer by chance, such as a checkpoint in every tenth iteration, does not count
against a task: they count where they take less in all rounds, beyond their noise.

Each round starts from the same state, since a shortcut replays the same outputs in each iteration,
which can lead training astray. On several ranks the pipeline is empty at each change: otherwise one
rank might replay a collective that another one runs.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

from swpipe._distributed.rank_checks import gather, is_alone
from swpipe.core.plan import PULL
from swpipe.errors import UnsavedStateError, add_note
from swpipe.profiler.host import HostObserver, HostRun, HostTimes
from swpipe.profiler.measure import Passage, Pulls, TimedRun, WindowTimer
from swpipe.profiler.other_load import OtherLoad, load_so_far
from swpipe.profiler.spread import (
    Estimate,
    mean_of,
    mean_of_loop,
    time_saved,
    with_replay,
)

Kind: TypeAlias = str
"""The task that is shortcut in a visit; ``PULL`` where the loader is not called."""

Visit: TypeAlias = tuple[Kind, list[float]]
"""A kind, and the times of the iterations that were timed."""

_SURE = 2.0
"""Others take less if they do by so many times the half-width of the 95% interval, and by"""
_LEAST_S = 20e-6  # at least

BASE: Kind = ""
"""No task."""

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


class Round(NamedTuple):
    """What was seen in a round: by iteration the time of each, visit by visit the kinds.

    Attributes:
        seen: The times of all tasks.
        visits: Kind to the times of its iterations, by their numbers.
        pulls: The loader's call in an iteration, by its number; empty if none is known.
    """

    seen: HostObserver
    visits: Sequence[tuple[Kind, Mapping[int, float]]]
    pulls: Mapping[int, HostRun]

    def hosts_s(self, pulls: bool) -> dict[int, dict[str, float]]:
        """Return the time of each task in each iteration; with ``pulls`` that of the call, too."""
        found: dict[int, dict[str, float]] = defaultdict(dict)
        for name, runs in self.seen.runs.items():
            for run in runs:
                found[run.iteration][name] = run.wall_s
        for number, run in self.pulls.items() if pulls else ():
            found[number][PULL] = run.wall_s
        return found


class Exposures:
    """What rounds of visits show of all sampled iterations, or of those with one of the batches.

    Attributes:
        times: Kind, and ``BASE``, to the times of all tasks in its visits.
        loop: Iterations without a shortcut, in their order: the passage over the loop, if there was
            one, or else those of the visits.

    Args:
        rounds: Two or more.
        kinds: Those that were visited.
        adds_up: Whether an iteration takes the sum of its tasks' times and of what is between them.
        counts_pulls: Whether the loader's call is one of these: it takes what it takes, however
            long it was not called.
        place: Where the batch comes in a ``cycle``; None for all of them.
        passage: Iterations over the loop, if there were some before the rounds.
    """

    def __init__(
        self,
        rounds: Sequence[Round],
        kinds: Sequence[Kind],
        *,
        adds_up: bool,
        counts_pulls: bool = True,
        cycle: int = 1,
        place: int | None = None,
        passage: Passage | None = None,
    ) -> None:
        self._adds_up, self._counts_pulls = adds_up, counts_pulls
        names = [*rounds[0].seen.runs]
        self.times = {kind: HostTimes(names) for kind in (BASE, *kinds)}
        steps_s: list[float] = []
        self._saved_s: dict[Kind, list[float]] = {kind: [] for kind in kinds}
        less: dict[Kind, dict[str, list[float]]] = {kind: defaultdict(list) for kind in kinds}
        pulls: list[HostRun] = []
        for each in rounds:
            hosts_s = each.hosts_s(counts_pulls)
            visits: list[Visit] = []
            means: dict[Kind, list[dict[str, float]]] = defaultdict(list)
            for kind, took_s in each.visits:
                kept = {n: s for n, s in took_s.items() if place in (None, n % cycle)}
                if kind in self.times:
                    self.times[kind].add(each.seen, kept)
                if kind == BASE:
                    steps_s += kept.values()
                    pulls += [each.pulls[n] for n in kept if n in each.pulls]
                rest_s = (s - sum(hosts_s[n].values()) * adds_up for n, s in kept.items())
                visits.append((kind, [*rest_s]))
                of = [hosts_s[n] for n in kept]
                means[kind].append({n: fmean(h.get(n, 0.0) for h in of) for n in of[0]})
            for kind, saved_s in differences_in(visits).items():
                self._saved_s[kind].append(saved_s)
                for name in means[BASE][0]:
                    before_s = fmean(mean_s[name] for mean_s in means[BASE])
                    less[kind][name].append(before_s - means[kind][0].get(name, 0.0))
        if pulls:
            self.times[BASE].put_first(PULL, pulls)
        own = Passage(steps_s, self.times[BASE], cycle if place is None else 1)
        self.loop = passage or own
        self.in_others_s: dict[Kind, dict[str, float]] = {}
        for kind in kinds:
            changes = {name: mean_of(of) for name, of in less[kind].items()}
            self.in_others_s[kind] = {
                name: change.value_s
                for name, change in changes.items()
                if name not in (kind, PULL)
                and change.value_s > max(_SURE * change.spread_s, _LEAST_S)
            }

    @property
    def step(self) -> Estimate:
        """An iteration in which all tasks run."""
        return mean_of_loop(self.loop.steps_s, self.loop.cycle)

    def saved(self, in_backward_s: Mapping[Kind, float]) -> dict[Kind, Estimate]:
        """Return how much shorter an iteration is if the task of each kind costs nothing."""
        found = {}
        for kind, rest in time_saved(self._saved_s).items():
            replay_s = in_backward_s.get(kind, 0.0)
            if not self._adds_up:
                replay_s += self.times[kind].host_s.get(kind, 0.0)
                found[kind] = with_replay(rest, replay_s)
                continue
            each_s = self.loop.times.each_s.get(kind, ())
            own = Estimate(0.0, 0.0)
            if each_s and (kind != PULL or self._counts_pulls):
                own = mean_of_loop(each_s, self.loop.cycle)
            value_s = rest.value_s + own.value_s + sum(self.in_others_s[kind].values()) + replay_s
            found[kind] = Estimate(value_s, math.hypot(rest.spread_s, own.spread_s))
        return found


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
        self.timer, self._counts, self._restore = timer, counts, restore
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
        timer, pulls = self.timer, self.timer.pulls
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
        begin_s, load = time.perf_counter(), load_so_far()
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
        counts, done, kinds = self._counts, len(self.base_s), list(self.saved_s)
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
        run, seen = self.timer.run(), HostObserver(task.name for task in pipe.tasks)
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
            numbers, took_s = run.numbers[measured], seconds[measured]
            taken.append((kind, dict(zip(numbers, took_s, strict=True))))
            calls = called[place] if called else []
            if calls and not self.timer.pipelined:
                self._rest_s[kind] = fmean(took_s) - fmean(each.wall_s for each in calls)
            # Under a plan the loader is called for iterations that are handed out later.
            by_number = zip(numbers, calls, strict=False)
            pulls |= {number: call._replace(iteration=number) for number, call in by_number}
        return Round(seen, taken, pulls)

    def _visit(self, run: TimedRun, kind: Kind) -> slice:
        timer, self._kind, pulls = self.timer, kind, self.timer.pulls
        length = max(timer.pipe.plan.depth if timer.pipelined else 1, timer.measure)
        if timer.cycle > 1:
            length = timer.whole_cycles(length)
        elif length > 1:
            length += self._rng.choice((-1, 0, 1))
        drain = pulls is not None and kind != PULL and self._is_slow(pulls, kind)
        if drain and pulls is not None:
            length = pulls.in_turns(length)
        replayed = [kind] if kind not in (BASE, PULL) else []
        extra_s, called = 0.0, 0

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


def differences_in(round_: Sequence[Visit]) -> dict[Kind, float]:
    """By how much each kind's iterations were shorter than those without a shortcut around it.

    These are taken from the line between the two visits without one.
    """
    bases = [index for index, (kind, _) in enumerate(round_) if kind == BASE]
    saved_s: dict[Kind, float] = {}
    for before, after in pairwise(bases):
        first_s, last_s = (fmean(round_[place][1]) for place in (before, after))
        for place in range(before + 1, after):
            kind, seconds = round_[place]
            share = (place - before) / (after - before)
            saved_s[kind] = first_s * (1 - share) + last_s * share - fmean(seconds)
    return saved_s
