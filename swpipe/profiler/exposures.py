"""Exposed times from rounds of visits, over all sampled iterations or those with one batch.

In serial iterations, times add up::

    iteration  | read | decode | forward | backward | gaps |
    exposed(forward) = forward + what other tasks take less + what the gaps take less

Therefore a task is not charged for time that other tasks take longer by chance, for example for a
checkpoint in every tenth iteration. Other tasks count only where they take less in all rounds, by
more than their noise.

Under a plan, and on a device, times do not add up. There, whole iterations with and without a
shortcut are compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple, TypeAlias

from swpipe.core.plan import PULL
from swpipe.profiler.host import HostObserver, HostRun, HostTimes
from swpipe.profiler.measure import Passage
from swpipe.profiler.spread import Estimate, mean_of, mean_of_loop, time_saved, with_replay

Kind: TypeAlias = str
"""The task that is shortcut in a visit; ``PULL`` if the loader is not called."""

Visit: TypeAlias = tuple[Kind, list[float]]
"""A kind, and the times of the iterations that were timed."""

BASE: Kind = ""
"""The kind of a visit in which no task is shortcut."""

_SURE = 2.0
_LEAST_S = 20e-6
"""Other tasks take less if the difference is at least this multiple of the half-width of its 95%
interval, and at least this many seconds.
"""


class Round(NamedTuple):
    """The measurements of a round: the times of its iterations, visit by visit.

    Attributes:
        seen: The times of all tasks.
        visits: Each visit's kind, with the times of its iterations by number.
        pulls: Iteration number to the loader's call; empty if no calls are known.
    """

    seen: HostObserver
    visits: Sequence[tuple[Kind, Mapping[int, float]]]
    pulls: Mapping[int, HostRun]

    def hosts_s(self, pulls: bool) -> dict[int, dict[str, float]]:
        """Return the tasks' times by iteration; if ``pulls``, with those of the loader's calls."""
        found: dict[int, dict[str, float]] = defaultdict(dict)
        for name, runs in self.seen.runs.items():
            for run in runs:
                found[run.iteration][name] = run.wall_s
        for number, run in self.pulls.items() if pulls else ():
            found[number][PULL] = run.wall_s
        return found


class Exposures:
    """The exposed times that follow from rounds of visits, of all batches or one of them.

    Attributes:
        times: Kind, or ``BASE``, to the times of all tasks in its visits.
        loop: Iterations without a shortcut, in order: the passage over the loop if there was one,
            or else those of the visits.
        in_others_s: Kind to the tasks that take less while it is shortcut, and how much less.

    Args:
        rounds: The rounds, two or more.
        kinds: The kinds that were visited.
        adds_up: Whether an iteration is the sum of the times of its tasks and of the gaps between
            them.
        counts_pulls: Whether the loader's call is one of these times. It is not if the loader works
            ahead.
        cycle: The number of iterations after which the batches repeat.
        place: The place of the batch in a cycle; None for all batches.
        passage: Iterations over the loop before the rounds, if there were any.
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
        self._adds_up = adds_up
        self._counts_pulls = counts_pulls
        names = [*rounds[0].seen.runs]
        self.times = {kind: HostTimes(names) for kind in (BASE, *kinds)}
        steps_s: list[float] = []
        self._saved_s: dict[Kind, list[float]] = {kind: [] for kind in kinds}
        less: dict[Kind, dict[str, list[float]]] = {kind: defaultdict(list) for kind in kinds}
        pulls: list[HostRun] = []
        # Each round yields one difference per kind and task: visits are compared within their
        # round.
        for each in rounds:
            hosts_s = each.hosts_s(counts_pulls)
            visits: list[Visit] = []
            means: dict[Kind, list[dict[str, float]]] = defaultdict(list)
            for kind, took_s in each.visits:
                kept = {n: s for n, s in took_s.items() if place in (None, n % cycle)}
                # A kind that failed in a later round was visited in this one, but is not in
                # ``times``.
                if kind in self.times:
                    self.times[kind].add(each.seen, kept)
                if kind == BASE:
                    steps_s += kept.values()
                    pulls += [each.pulls[n] for n in kept if n in each.pulls]
                # ``rest_s`` is the gaps between tasks if times add up, and the whole iteration
                # otherwise.
                rest_s = (s - sum(hosts_s[n].values()) * adds_up for n, s in kept.items())
                visits.append((kind, [*rest_s]))
                of = [hosts_s[n] for n in kept]
                means[kind].append({n: fmean(h.get(n, 0.0) for h in of) for n in of[0]})
            for kind, saved_s in differences_in(visits).items():
                if kind not in self._saved_s:  # it failed in a later round
                    continue
                self._saved_s[kind].append(saved_s)
                # A positive difference means that the task takes less while the kind is shortcut.
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
            # Differences within the noise would add up over many tasks, so only significant ones
            # count.
            self.in_others_s[kind] = {
                name: change.value_s
                for name, change in changes.items()
                if name not in (kind, PULL)
                and change.value_s > max(_SURE * change.spread_s, _LEAST_S)
            }

    @property
    def step(self) -> Estimate:
        """The time of an iteration in which all tasks run, with its interval."""
        return mean_of_loop(self.loop.steps_s, self.loop.cycle)

    def saved(self, in_backward_s: Mapping[Kind, float]) -> dict[Kind, Estimate]:
        """Return how much shorter an iteration is if the task of each kind costs nothing."""
        found = {}
        for kind, rest in time_saved(self._saved_s).items():
            replay_s = in_backward_s.get(kind, 0.0)
            # Whole iterations with the replay are too long by the replay, which may have been
            # hidden.
            if not self._adds_up:
                replay_s += self.times[kind].host_s.get(kind, 0.0)
                found[kind] = with_replay(rest, replay_s)
                continue
            # The sum of the module's drawing: the task itself, the gaps and the other tasks. The
            # replay's part in the backward of others is added back.
            each_s = self.loop.times.each_s.get(kind, ())
            own = Estimate(0.0, 0.0)
            if each_s and (kind != PULL or self._counts_pulls):
                own = mean_of_loop(each_s, self.loop.cycle)
            value_s = rest.value_s + own.value_s + sum(self.in_others_s[kind].values()) + replay_s
            found[kind] = Estimate(value_s, math.hypot(rest.spread_s, own.spread_s))
        return found


def differences_in(round_: Sequence[Visit]) -> dict[Kind, float]:
    """Return for each kind how much shorter its iterations were than those without a shortcut.

    The latter are taken from the line between the two visits without a shortcut around the kind.
    """
    bases = [index for index, (kind, _) in enumerate(round_) if kind == BASE]
    saved_s: dict[Kind, float] = {}
    for before, after in pairwise(bases):
        first_s, last_s = (fmean(round_[place][1]) for place in (before, after))
        for place in range(before + 1, after):
            kind, seconds = round_[place]
            # The linear interpolation cancels a drift of the machine between the two visits.
            share = (place - before) / (after - before)
            saved_s[kind] = first_s * (1 - share) + last_s * share - fmean(seconds)
    return saved_s
