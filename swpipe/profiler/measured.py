"""What was measured on one batch: means, intervals, and what replays took."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from swpipe.core.plan import PULL
from swpipe.profiler.host import HostTimes
from swpipe.profiler.measure import WindowTimer
from swpipe.profiler.rounds import BASE, Kind, Rounds
from swpipe.profiler.spread import Estimate, mean_of, time_saved, with_replay

NO_WORK_S = 20e-6
NO_WORK_SHARE = 0.01
"""A task that takes less, in seconds and as a part of an iteration, may have nothing to do."""


@dataclass(frozen=True)
class Measured:
    """What was measured on one batch; call this once the rounds are over.

    Attributes:
        joint: Tasks that were shortcut together, and what they have in common.
        device_s: Task to its time on its stream, where it has one.
    """

    label: str
    timer: WindowTimer
    rounds: Rounds
    joint: dict[Kind, str]
    device_s: dict[str, float]

    @cached_property
    def times(self) -> HostTimes:
        """The times of all tasks, the calls of the loader first if they were measured."""
        times = self.rounds.times[BASE]
        if self.timer.pulls is not None:
            times.put_first(PULL, self.timer.pulls.runs)
        return times

    @cached_property
    def step(self) -> Estimate:
        """An iteration in which all tasks run."""
        return mean_of(self.rounds.base_s)

    @cached_property
    def replays_s(self) -> dict[Kind, float]:
        """What the replays of each kind took, per iteration."""
        return {
            kind: fmean(self.rounds.in_backward_s[kind])
            + sum(self.rounds.times[kind].host_s[name] for name in kind if name != PULL)
            for kind in self.rounds.saved_s
        }

    @cached_property
    def saved(self) -> dict[Kind, Estimate]:
        """How much shorter an iteration is if the tasks of each kind cost nothing."""
        alone = not (self.timer.pipelined or self.timer.pipe.device.has_streams)
        return {
            kind: with_replay(estimate, self.replays_s[kind], alone=alone)
            for kind, estimate in time_saved(self.rounds.saved_s).items()
        }

    @cached_property
    def exposed(self) -> dict[str, Estimate]:
        """Task to its exposed time, with its sign."""
        return {kind[0]: estimate for kind, estimate in self.saved.items() if len(kind) == 1}

    @property
    def no_work(self) -> tuple[str, ...]:
        """Tasks that take no time to speak of, and without which iterations are no shorter."""
        least_s = min(NO_WORK_S, NO_WORK_SHARE * self.step.value_s)
        usual_s = self.times.median_s
        return tuple(
            name
            for name, (value_s, spread_s) in self.exposed.items()
            if usual_s[name] + self.device_s.get(name, 0.0) < least_s and value_s <= spread_s
        )

    def in_others_s(self, name: str) -> dict[str, float]:
        """The other tasks that take less while one is shortcut, and how much less."""
        shorter = self.rounds.times[BASE].shorter_in(self.rounds.times[name,])
        return {other: s for other, s in shorter.items() if other != name}
