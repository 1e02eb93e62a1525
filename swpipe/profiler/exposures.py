"""Exposed times from rounds of visits, over all sampled iterations or those with one batch.

In serial iterations, times add up::

    iteration  | read | decode | forward | backward | gaps |
    exposed(forward) = forward + what other tasks take less + what the gaps take less

Therefore a task is not charged for time that other tasks take longer by chance, for example for a
checkpoint in every tenth iteration. Other tasks count in full only where they take less in all
rounds, by more than their noise. The lower quartile of any other task does not show such a chance,
but it does show what changes in every iteration, such as the contents of caches: its difference
counts between nothing and in full.

Under a plan, and on a device, times do not add up. There, whole iterations with and without a
shortcut are compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean

from swpipe.core.plan import PULL
from swpipe.profiler.host import ThreadTimes, TimedIteration, times_of
from swpipe.profiler.measure import Passage
from swpipe.profiler.rounds import Rounds, Visit
from swpipe.profiler.spread import (
    BASE,
    Estimate,
    Kind,
    between,
    differences_in,
    mean_of,
    mean_of_loop,
    time_saved,
)

_SURE = 2.0
_LEAST_S = 20e-6
"""Other tasks take less if the difference is at least this multiple of the half-width of its 95%
interval, and at least this many seconds.
"""

_NOTHING = ThreadTimes(0.0, each_s=(0.0,))
"""The times of what does not run: a loader that is not called."""


class Exposures:
    """The exposed times that follow from rounds of visits, of all batches or one of them.

    Attributes:
        loop: Iterations without a shortcut, in order: the passage over the loop if there was one,
            or else those of the visits.
        replays_s: Kind to the time of its replay: on its own thread, and in the backward of other
            tasks.
        in_others_s: Kind to the tasks that take less while it is shortcut, and how much less.
        device_s: Task to the time of its work on its stream, in each iteration; empty without
            streams.

    Args:
        rounds: Two rounds or more.
        place: The place of the batch in a cycle of batches; None for all batches.
        passage: Iterations over the loop before the rounds, if there were any.
        on_streams: The iterations in which work on streams was timed, if there were any.
    """

    def __init__(
        self,
        rounds: Rounds,
        place: int | None,
        passage: Passage | None,
        on_streams: Passage | None,
    ) -> None:
        timer = rounds.timer
        # Serially an iteration is the sum of the times of its tasks and of the gaps between them.
        self._adds_up = not (timer.pipelined or timer.pipe.device.has_streams)
        # The calls of a loader that works ahead say nothing about the time that a batch takes.
        self._counts_pulls = not timer.pulls.works_ahead
        visited = [
            [
                Visit(kind, [i for i in every if place in (None, i.number % timer.cycle)])
                for kind, every in visits
            ]
            for visits in rounds.completed
        ]
        base = _of_kind(BASE, chain(*visited))
        steps_s = [each.step_s for each in base]
        own = Passage(steps_s, times_of(base), timer.cycle if place is None else 1)
        self.loop = passage or own
        self.device_s = {} if on_streams is None else on_streams.of_batch(place)
        # A kind that failed in a later round has been left out of ``rounds.saved_s``.
        kinds = rounds.saved_s.keys()
        self._saved_s: dict[Kind, list[float]] = {kind: [] for kind in kinds}
        replays_s: dict[Kind, list[float]] = {kind: [] for kind in kinds}
        less_s: dict[Kind, dict[str, list[float]]] = {kind: defaultdict(list) for kind in kinds}
        small_s: dict[Kind, dict[str, list[float]]] = {kind: defaultdict(list) for kind in kinds}
        # Each round yields one difference per kind and task: visits are compared within their
        # round.
        for visits in visited:
            rests = [(kind, [*map(self._rest_s, iterations)]) for kind, iterations in visits]
            saved_s = differences_in(rests)
            times = {kind: times_of(_of_kind(kind, visits)) for kind in (BASE, *saved_s)}
            for kind in saved_s.keys() & kinds:
                beside = times[kind]
                self._saved_s[kind].append(saved_s[kind])
                replays_s[kind].append(beside.get(kind, _NOTHING).host_s)
                # A positive difference means that the task takes less while the kind is shortcut.
                for name, thread in times[BASE].items():
                    without = beside.get(name, _NOTHING)
                    less_s[kind][name].append(thread.host_s - without.host_s)
                    change_s = _quartile(thread.each_s) - _quartile(without.each_s)
                    small_s[kind][name].append(change_s)
        self._in_backward_s = {kind: fmean(rounds.in_backward_s[kind]) for kind in kinds}
        self.replays_s = {
            kind: fmean(replays_s[kind]) + self._in_backward_s[kind] for kind in kinds
        }
        self.in_others_s = {kind: _in_others(kind, less_s[kind]) for kind in kinds}
        self._unclear_s = {
            kind: [
                fmean(of)
                for name, of in small_s[kind].items()
                if name not in (kind, PULL, *self.in_others_s[kind])
            ]
            for kind in kinds
        }

    def _rest_s(self, iteration: TimedIteration) -> float:
        """Return the time of the gaps between tasks, or of the iteration if times do not add up."""
        tasks_s = sum(
            run.wall_s
            for name, run in iteration.runs.items()
            if self._adds_up and (self._counts_pulls or name != PULL)
        )
        return iteration.step_s - tasks_s

    @property
    def step(self) -> Estimate:
        """The time of an iteration in which all tasks run, with its interval."""
        return mean_of_loop(self.loop.steps_s, self.loop.cycle)

    def saved(self) -> dict[Kind, Estimate]:
        """Return how much shorter an iteration is if the task of each kind costs nothing."""
        rests = time_saved(self._saved_s)
        # Whole iterations with the replay are too long by the replay. Other work may hide it, or
        # wait for it: threads share the interpreter lock.
        if not self._adds_up:
            return {kind: between(rests[kind], self.replays_s[kind]) for kind in rests}
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
            estimate = Estimate(value_s, math.hypot(rest.spread_s, own.spread_s))
            for change_s in self._unclear_s[kind]:
                estimate = between(estimate, change_s)
            estimates[kind] = estimate
        return estimates


def _of_kind(kind: Kind, visits: Iterable[Visit]) -> list[TimedIteration]:
    """Return the iterations of all visits of a kind, in order."""
    return [iteration for visit in visits if visit.kind == kind for iteration in visit.iterations]


def _quartile(each_s: Sequence[float]) -> float:
    """Return the lower quartile."""
    return sorted(each_s)[len(each_s) // 4]


def _in_others(kind: Kind, less_s: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the other tasks that certainly take less while a kind is shortcut, and how much."""
    changes = {name: mean_of(of) for name, of in less_s.items() if name not in (kind, PULL)}
    # Differences within the noise would add up over many tasks, so they do not count.
    return {
        name: change.value_s
        for name, change in changes.items()
        if change.value_s > max(_SURE * change.spread_s, _LEAST_S)
    }
