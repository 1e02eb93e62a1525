"""Time on the thread, and off the CPU."""

from __future__ import annotations

import time

import pytest

from swpipe import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.profiler.host import HostObserver, HostTimes
from swpipe.program import compile_plan
from tests.support.virtual_clock import TimedHost

ON = compile_plan(resolve_plan(PipelinePlan.serial(["sleep", "spin"])), streams=False).instructions


def run(host: TimedHost, seen: HostObserver, iteration: int, sleeps_s: float = 0.01) -> None:
    """One task that leaves the CPU, one that does not, and what no task does."""
    for name, act in (("sleep", host.sleep), ("spin", host.compute), ("<admit>", host.sleep)):
        seen.arrive(ON[name], iteration)
        seen.start(ON[name], iteration)
        act(sleeps_s if name == "sleep" else 0.02)
        seen.stop(ON[name], iteration)


def test_sleeping_blocks_and_computing_does_not(host: TimedHost) -> None:
    """Both hold the thread, only one leaves the CPU; warm-up and what is no task do not count."""
    times = HostTimes(["sleep", "spin"])
    seen = times.observer()
    run(host, seen, 0, sleeps_s=0.05)
    for iteration in range(1, 6):
        run(host, seen, iteration)
    times.add(seen, range(1, 6))
    assert times.host_s == pytest.approx({"sleep": 0.01, "spin": 0.02})
    assert times.cpu_s == pytest.approx({"sleep": 0.0, "spin": 0.02})
    assert times.blocked_s == pytest.approx({"sleep": 0.01, "spin": 0.0})


def test_a_coarse_cpu_clock_gives_no_negative_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time may advance by a whole step during a shorter task."""
    ticks = iter(range(100))
    times = HostTimes(["sleep"])
    seen = times.observer()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))
    seen.start(ON["sleep"], 0)
    seen.stop(ON["sleep"], 0)
    times.add(seen, range(1))
    assert times.blocked_s == {"sleep": 0.0}
