"""Time on the thread, and off the CPU."""

from __future__ import annotations

import time

import pytest

from swpipe import PipelinePlan, PipelineTask
from swpipe._engine.program import Instruction, compile_plan
from swpipe.core.resolved import resolve_plan
from swpipe.profiler.host import HostObserver, HostTimes, TaskRun
from tests.support.virtual_clock import TimedHost


def tasks_on(host: TimedHost) -> list[PipelineTask]:
    """One that leaves the CPU, and one that does not."""
    return [
        PipelineTask("sleep", lambda ctx: host.sleep(0.01)),
        PipelineTask("spin", lambda ctx: host.compute(0.02)),
    ]


@pytest.fixture
def instructions() -> dict[str, Instruction]:
    """What observers are told of."""
    return compile_plan(
        resolve_plan(PipelinePlan.serial(["sleep", "spin"])), streams=False
    ).instructions


def run(
    host: TimedHost, seen: HostObserver, instructions: dict[str, Instruction], iteration: int
) -> None:
    """All tasks, observed."""
    for task in tasks_on(host):
        seen.arrive(instructions[task.name], iteration)
        seen.start(instructions[task.name], iteration)
        task.fn(None)  # type: ignore[arg-type]
        seen.stop(instructions[task.name], iteration)


def test_sleeping_blocks_and_computing_does_not(
    host: TimedHost, instructions: dict[str, Instruction]
) -> None:
    """Both hold the thread; only one of them leaves the CPU."""
    times = HostTimes(["sleep", "spin"])
    seen = times.observer()
    for iteration in range(5):
        run(host, seen, instructions, iteration)
    times.add(seen, range(1000))
    assert times.host_s == pytest.approx({"sleep": 0.01, "spin": 0.02})
    assert times.cpu_s == pytest.approx({"sleep": 0.0, "spin": 0.02})
    assert times.blocked_s == pytest.approx({"sleep": 0.01, "spin": 0.0})


def test_a_task_shorter_than_the_clock_resolution_takes_no_time(
    host: TimedHost, instructions: dict[str, Instruction]
) -> None:
    """It was not blocked either."""
    times = HostTimes(["sleep"])
    seen = times.observer()
    seen.start(instructions["sleep"], 0)
    seen.stop(instructions["sleep"], 0)
    times.add(seen, range(1000))
    assert times.host_s == times.blocked_s == {"sleep": 0.0}


def test_a_coarse_cpu_clock_gives_no_negative_time(
    instructions: dict[str, Instruction], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU time may advance by a whole step during a shorter task."""
    ticks = iter(range(100))
    times = HostTimes(["sleep"])
    seen = times.observer()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))
    seen.start(instructions["sleep"], 0)
    seen.stop(instructions["sleep"], 0)
    times.add(seen, range(1000))
    assert times.blocked_s == {"sleep": 0.0}


def test_warm_up_does_not_count(host: TimedHost, instructions: dict[str, Instruction]) -> None:
    """Runs of iterations outside the range are dropped."""
    times = HostTimes(["sleep", "spin"])
    seen = times.observer()
    ins = instructions["sleep"]
    seen.start(ins, 3)
    host.sleep(0.05)
    seen.stop(ins, 3)
    run(host, seen, instructions, 4)
    times.add(seen, range(4, 1000))
    assert times.host_s["sleep"] == pytest.approx(0.01)


def test_other_tasks_are_not_timed(host: TimedHost, instructions: dict[str, Instruction]) -> None:
    """Nor are ``<admit>`` and ``<retire>``."""
    times = HostTimes(["spin"])
    seen = times.observer()
    run(host, seen, instructions, 0)
    seen.start(instructions["<admit>"], 0)
    seen.stop(instructions["<admit>"], 0)
    times.add(seen, range(1000))
    assert list(times.host_s) == ["spin"]


def test_what_becomes_shorter_is_told_if_it_is_no_noise() -> None:
    """Runs of one visit are alike: three visits of 1 ms, then two of 2, say little."""

    def times(*visits_ms: float) -> HostTimes:
        found = HostTimes(["backward"])
        for ms in visits_ms:
            seen = found.observer()
            seen.runs["backward"] += [TaskRun(i, ms / 1e3, ms / 1e3) for i in range(50)]
            found.add(seen, range(50))
        return found

    steady, shorter = times(5.0, 5.1, 4.9, 5.0), times(3.0, 3.1, 2.9)
    assert steady.shorter_in(shorter) == {"backward": pytest.approx(2e-3)}
    assert times(5.0, 3.0, 7.0, 5.0).shorter_in(times(3.0, 5.0, 4.0)) == {}
    assert shorter.shorter_in(steady) == {}
