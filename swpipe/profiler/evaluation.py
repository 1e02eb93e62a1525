"""From what was measured to a result."""

from __future__ import annotations

from statistics import median

import torch.distributed as dist

from swpipe._distributed.rank_checks import gather, is_alone
from swpipe.profiler.advice import advise
from swpipe.profiler.figures import Joint
from swpipe.profiler.measured import Measured
from swpipe.profiler.rank_times import RankTimes
from swpipe.profiler.result import ProfileResult
from swpipe.profiler.together import busy_s


def result_of(
    measured: Measured, put_back: tuple[str, ...], left_out: tuple[str, ...]
) -> ProfileResult:
    """The result on one batch.

    Args:
        measured: What was measured.
        put_back: The objects that were restored.
        left_out: Tasks that were shortcut already.
    """
    rounds, timer, step, exposed = measured.rounds, measured.timer, measured.step, measured.exposed
    failed = {kind[0]: error for kind, error in rounds.failed.items() if len(kind) == 1}
    host_s, blocked_s, device_s = measured.times.host_s, measured.times.blocked_s, measured.device_s
    names = [name for name in host_s if name in exposed or name in failed]
    return ProfileResult(
        batch=measured.label,
        mode="pipelined" if timer.pipelined else "serial",
        baseline_s=step.value_s,
        baseline_median_s=median(rounds.spans_s),
        baseline_spread_s=step.spread_s,
        exposed_s={n: min(max(0.0, each.value_s), step.value_s) for n, each in exposed.items()},
        raw_s={name: each.value_s for name, each in exposed.items()},
        spread_s={name: each.spread_s for name, each in exposed.items()},
        replay_s={name: measured.replays_s[name,] for name in exposed},
        in_others_s={name: measured.in_others_s(name) for name in exposed},
        host_s={name: host_s[name] for name in names},
        blocked_s={name: blocked_s[name] for name in names},
        device_s={name: device_s[name] for name in names if name in device_s},
        busy_s=busy_s(timer.pipe.plan, host_s) if timer.pipelined else {},
        joint=tuple(
            Joint(what, kind, *measured.saved[kind])
            for kind, what in measured.joint.items()
            if kind in measured.saved
        ),
        advice=advise(measured),
        not_measured={name: f"{type(error).__name__}: {error}" for name, error in failed.items()},
        interrupted=rounds.interrupted,
        disturbed=rounds.disturbed,
        no_work=measured.no_work,
        other_load=rounds.other_load,
        ranks=() if is_alone() else tuple(gather(_on_this_rank(measured))),
        collectives=tuple(t for t, e in timer.pipe.plan.schedule.items() if e.globally_ordered),
        num_warmup=timer.warmup,
        num_measure=timer.measure,
        num_rounds=len(rounds.base_s),
        put_back=put_back,
        already_shortcut=left_out,
    )


def _on_this_rank(measured: Measured) -> RankTimes:
    times = measured.times
    return RankTimes(
        rank=dist.get_rank(),
        baseline_s=measured.step.value_s,
        exposed_s={name: max(0.0, each.value_s) for name, each in measured.exposed.items()},
        spread_s={name: each.spread_s for name, each in measured.exposed.items()},
        host_s=times.host_s,
        error_s=times.error_s,
        in_others_s={name: measured.in_others_s(name) for name in measured.exposed},
    )
