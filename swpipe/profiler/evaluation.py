"""From what was measured to a result: means, intervals, what replays took, advice."""

from __future__ import annotations

from statistics import fmean, median
from typing import NamedTuple

from swpipe.core.effects import declared_effects
from swpipe.core.plan import PULL
from swpipe.profiler.advice import Advice, Seen, advise
from swpipe.profiler.measure import WindowTimer
from swpipe.profiler.result import Joint, ProfileResult
from swpipe.profiler.rounds import BASE, Counts, Kind, Rounds
from swpipe.profiler.spread import Estimate, mean_of, time_saved, with_replay
from swpipe.profiler.together import busy_s


class Measured(NamedTuple):
    """What was measured on one batch.

    Attributes:
        joint: Tasks that were shortcut together, and what they have in common.
        device_s: Task to its time on its stream, where it has one.
    """

    label: str
    timer: WindowTimer
    rounds: Rounds
    joint: dict[Kind, str]
    device_s: dict[str, float]

    def replays_s(self) -> dict[Kind, float]:
        """What the replays of each kind took, per iteration."""
        return {
            kind: fmean(self.rounds.in_backward_s[kind])
            + sum(self.rounds.times[kind].host_s[name] for name in kind if name != PULL)
            for kind in self.rounds.saved_s
        }

    @property
    def host_s(self) -> dict[str, float]:
        """Task to its time on its thread, the call of the loader first if it was measured."""
        pulls, times = self.timer.pulls, self.rounds.times[BASE]
        return ({PULL: pulls.host_s} if pulls else {}) | times.host_s

    @property
    def cpu_s(self) -> dict[str, float]:
        """The same of the time on the CPU."""
        pulls, times = self.timer.pulls, self.rounds.times[BASE]
        return ({PULL: pulls.cpu_s} if pulls else {}) | times.cpu_s

    def saved(self) -> dict[Kind, Estimate]:
        """How much shorter an iteration is if the tasks of each kind cost nothing."""
        alone = not (self.timer.pipelined or self.timer.pipe.device.has_streams)
        replays_s = self.replays_s()
        return {
            kind: with_replay(estimate, replays_s[kind], alone=alone)
            for kind, estimate in time_saved(self.rounds.saved_s).items()
        }

    def in_others_s(self, name: str) -> dict[str, float]:
        """The other tasks that take less while one is shortcut, and how much less."""
        shorter = self.rounds.times[BASE].shorter_in(self.rounds.times[name,])
        return {other: s for other, s in shorter.items() if other != name}

    def advice(self, step: Estimate, exposed: dict[str, Estimate]) -> tuple[Advice, ...]:
        """What to change next."""
        pipe, pulls = self.timer.pipe, self.timer.pulls
        loader = {PULL: pulls.effects} if pulls else {}
        seen = Seen(
            plan=pipe.plan,
            pipelined=self.timer.pipelined,
            streams=pipe.device.has_streams,
            step_s=step,
            host_s=self.host_s,
            cpu_s=self.cpu_s,
            device_s=self.device_s,
            exposed_s=exposed,
            declared={**loader, **declared_effects(pipe.tasks)},
        )
        return advise(seen)


def result_of(
    measured: Measured, counts: Counts, put_back: tuple[str, ...], left_out: tuple[str, ...]
) -> ProfileResult:
    """The result on one batch.

    Args:
        measured: What was measured.
        counts: How much was asked for.
        put_back: The objects that were restored.
        left_out: Tasks that were shortcut already.
    """
    rounds, timer = measured.rounds, measured.timer
    step, saved, replays_s = mean_of(rounds.base_s), measured.saved(), measured.replays_s()
    exposed = {kind[0]: estimate for kind, estimate in saved.items() if len(kind) == 1}
    failed = {kind[0]: error for kind, error in rounds.failed.items() if len(kind) == 1}
    host_s, cpu_s, device_s = measured.host_s, measured.cpu_s, measured.device_s
    names = [name for name in host_s if name in exposed or name in failed]
    return ProfileResult(
        batch=measured.label,
        mode="pipelined" if timer.pipelined else "serial",
        baseline_s=step.value_s,
        baseline_median_s=median(rounds.spans_s),
        baseline_spread_s=step.spread_s,
        exposed_s={name: max(0.0, each.value_s) for name, each in exposed.items()},
        raw_s={name: each.value_s for name, each in exposed.items()},
        spread_s={name: each.spread_s for name, each in exposed.items()},
        replay_s={name: replays_s[name,] for name in exposed},
        in_others_s={name: measured.in_others_s(name) for name in exposed},
        host_s={name: host_s[name] for name in names},
        blocked_s={name: max(0.0, host_s[name] - cpu_s[name]) for name in names},
        device_s={name: device_s[name] for name in names if name in device_s},
        busy_s=busy_s(timer.pipe.plan, host_s) if timer.pipelined else {},
        joint=tuple(
            Joint(what, kind, *saved[kind])
            for kind, what in measured.joint.items()
            if kind in saved
        ),
        advice=measured.advice(step, exposed),
        not_measured={name: f"{type(error).__name__}: {error}" for name, error in failed.items()},
        interrupted=rounds.interrupted,
        disturbed=rounds.disturbed,
        num_warmup=counts.num_warmup,
        num_measure=counts.num_measure,
        num_rounds=len(rounds.base_s),
        put_back=put_back,
        already_shortcut=left_out,
    )
