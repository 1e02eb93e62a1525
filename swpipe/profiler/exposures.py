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
from swpipe.profiler.host import TimedIteration, times_of
from swpipe.profiler.measure import Passage
from swpipe.profiler.spread import Estimate, mean_of, mean_of_loop, time_saved, with_replay

Kind: TypeAlias = str
"""The task that is shortcut in a visit; ``PULL`` if the loader is not called."""

BASE: Kind = ""
"""The kind of a visit in which no task is shortcut."""

_SURE = 2.0
_LEAST_S = 20e-6
"""Other tasks take less if the difference is at least this multiple of the half-width of its 95%
interval, and at least this many seconds.
"""


class Visit(NamedTuple):
    """The timed iterations of a visit."""

    kind: Kind
    iterations: Sequence[TimedIteration]


class Exposures:
    """The exposed times that follow from rounds of visits, of all batches or one of them.

    Attributes:
        loop: Iterations without a shortcut, in order: the passage over the loop if there was one,
            or else those of the visits.
        replays_s: Kind to the time of its replay: on its own thread, and in the backward of other
            tasks.
        in_others_s: Kind to the tasks that take less while it is shortcut, and how much less.

    Args:
        rounds: The visits of each round; two rounds or more.
        in_backward_s: Kind that was visited to the time of its replay in the backward of others.
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
        rounds: Sequence[Sequence[Visit]],
        in_backward_s: Mapping[Kind, float],
        *,
        adds_up: bool,
        counts_pulls: bool,
        cycle: int,
        place: int | None = None,
        passage: Passage | None = None,
    ) -> None:
        self._in_backward_s = in_backward_s
        self._adds_up = adds_up
        self._counts_pulls = counts_pulls
        base: list[list[TimedIteration]] = []
        self._saved_s: dict[Kind, list[float]] = {kind: [] for kind in in_backward_s}
        replays_s: dict[Kind, list[float]] = {kind: [] for kind in in_backward_s}
        less: dict[Kind, dict[str, list[float]]] = {k: defaultdict(list) for k in in_backward_s}
        # Each round yields one difference per kind and task: visits are compared within their
        # round.
        for each in rounds:
            rests: list[tuple[Kind, list[float]]] = []
            means: dict[Kind, list[dict[str, float]]] = defaultdict(list)
            for kind, every in each:
                iterations = [i for i in every if place in (None, i.number % cycle)]
                if kind == BASE:
                    base.append(iterations)
                hosts_s = [
                    {n: run.wall_s for n, run in i.runs.items() if counts_pulls or n != PULL}
                    for i in iterations
                ]
                # The rest is the gaps between tasks if times add up, and the whole iteration
                # otherwise.
                both = zip(iterations, hosts_s, strict=True)
                rests.append((kind, [i.step_s - sum(of.values()) * adds_up for i, of in both]))
                means[kind].append({n: fmean(of.get(n, 0.0) for of in hosts_s) for n in hosts_s[0]})
            for kind, saved_s in differences_in(rests).items():
                if kind not in self._saved_s:  # it failed in a later round
                    continue
                self._saved_s[kind].append(saved_s)
                (beside_s,) = means[kind]
                replays_s[kind].append(beside_s.get(kind, 0.0))
                # A positive difference means that the task takes less while the kind is shortcut.
                for name in means[BASE][0]:
                    before_s = fmean(mean_s[name] for mean_s in means[BASE])
                    less[kind][name].append(before_s - beside_s.get(name, 0.0))
        steps_s = [each.step_s for iterations in base for each in iterations]
        own = Passage(steps_s, times_of(base), cycle if place is None else 1)
        self.loop = passage or own
        self.replays_s = {kind: s + fmean(replays_s[kind]) for kind, s in in_backward_s.items()}
        self.in_others_s: dict[Kind, dict[str, float]] = {}
        for kind in in_backward_s:
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

    def saved(self) -> dict[Kind, Estimate]:
        """Return how much shorter an iteration is if the task of each kind costs nothing."""
        rests = time_saved(self._saved_s)
        # Whole iterations with the replay are too long by the replay, which may have been hidden.
        if not self._adds_up:
            return {kind: with_replay(rests[kind], self.replays_s[kind]) for kind in rests}
        estimates = {}
        tasks = self.loop.tasks
        for kind, rest in rests.items():
            # The sum of the module's drawing: the task itself, the gaps and the other tasks. The
            # replay's part in the backward of others is added back.
            own = Estimate(0.0, 0.0)
            if kind in tasks and (kind != PULL or self._counts_pulls):
                own = mean_of_loop(tasks[kind].each_s, self.loop.cycle)
            others_s = sum(self.in_others_s[kind].values()) + self._in_backward_s[kind]
            value_s = rest.value_s + own.value_s + others_s
            estimates[kind] = Estimate(value_s, math.hypot(rest.spread_s, own.spread_s))
        return estimates


def differences_in(round_: Sequence[tuple[Kind, Sequence[float]]]) -> dict[Kind, float]:
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
