"""Time on the thread, and off the CPU."""

from __future__ import annotations

import time

import pytest

from swpipe import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.profiler.host import HostObserver, ThreadTimes, times_of
from swpipe.program import compile_plan
from tests.support.virtual_clock import TimedHost

ON = compile_plan(resolve_plan(PipelinePlan.serial(["sleep", "spin"])), streams=False).instructions


def run(host: TimedHost, seen: HostObserver, iteration: int, sleeps_s: float = 0.01) -> None:
    """Run a task that sleeps, one that computes, and an action of the engine."""
    for name, act in (("sleep", host.sleep), ("spin", host.compute), ("<admit>", host.sleep)):
        seen.arrive(ON[name], iteration)
        seen.start(ON[name], iteration)
        act(sleeps_s if name == "sleep" else 0.02)
        seen.stop(ON[name], iteration)


def test_sleeping_blocks_and_computing_does_not(host: TimedHost) -> None:
    """Both hold the thread, only one leaves the CPU; warm-up and other code do not count."""
    seen = HostObserver(["sleep", "spin"])
    run(host, seen, 0, sleeps_s=0.05)
    for iteration in range(1, 6):
        run(host, seen, iteration)
    sleep, spin = times_of(seen.timed(dict.fromkeys(range(1, 6), 0.03), [])).values()
    assert (sleep.host_s, spin.host_s) == pytest.approx((0.01, 0.02))
    assert (sleep.cpu_s, spin.cpu_s) == pytest.approx((0.0, 0.02))
    assert (sleep.blocked_s, spin.blocked_s) == pytest.approx((0.01, 0.0))
    assert spin.each_s == pytest.approx([0.02] * 5)


def test_the_error_of_successive_runs_is_that_of_their_parts(host: TimedHost) -> None:
    """Equal runs have none, and a single run one as large as the run."""
    seen = HostObserver(["sleep", "spin"])
    for iteration in range(8):
        run(host, seen, iteration)
    every = seen.timed(dict.fromkeys(range(8), 0.03), [])
    assert times_of(every)["spin"].error_s == pytest.approx(0)
    assert times_of(every[:1])["spin"].error_s == pytest.approx(0.02)
    assert times_of(every)["spin"].host.is_clear


def test_a_coarse_cpu_clock_gives_no_negative_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time may advance by a whole step during a shorter task."""
    ticks = iter(range(100))
    seen = HostObserver(["sleep"])
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))
    seen.start(ON["sleep"], 0)
    seen.stop(ON["sleep"], 0)
    assert times_of(seen.timed({0: 0.0}, []))["sleep"].blocked_s == 0.0


def test_a_wait_for_a_core_that_exceeds_a_run_leaves_no_time_on_the_cpu() -> None:
    """The two come from different clocks; a negative time would be refused as a cost."""
    assert ThreadTimes(host_s=1e-3, core_s=1.2e-3).cpu_s == 0.0
