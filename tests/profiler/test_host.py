"""Time on the thread, and off the CPU."""

from __future__ import annotations

import time

import pytest

from swpipe import PipelinePlan, PipelineTask
from swpipe._engine.program import Instruction, compile_plan
from swpipe.core.resolved import resolve_plan
from swpipe.profiler.host import HostTimes
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
    host: TimedHost, times: HostTimes, instructions: dict[str, Instruction], iteration: int
) -> None:
    """All tasks, observed."""
    for task in tasks_on(host):
        times.arrive(instructions[task.name], iteration)
        times.start(instructions[task.name], iteration)
        task.fn(None)  # type: ignore[arg-type]
        times.stop(instructions[task.name], iteration)


def test_sleeping_blocks_and_computing_does_not(
    host: TimedHost, instructions: dict[str, Instruction]
) -> None:
    """Both hold the thread; only one of them leaves the CPU."""
    times = HostTimes(["sleep", "spin"])
    for iteration in range(5):
        run(host, times, instructions, iteration)
    times.keep(range(1000))
    assert times.host_s == pytest.approx({"sleep": 0.01, "spin": 0.02})
    assert times.cpu_s == pytest.approx({"sleep": 0.0, "spin": 0.02})
    assert times.blocked_s == pytest.approx({"sleep": 0.01, "spin": 0.0})


def test_a_task_shorter_than_the_clock_resolution_takes_no_time(
    host: TimedHost, instructions: dict[str, Instruction]
) -> None:
    """It was not blocked either."""
    times = HostTimes(["sleep"])
    times.start(instructions["sleep"], 0)
    times.stop(instructions["sleep"], 0)
    times.keep(range(1000))
    assert times.host_s == times.blocked_s == {"sleep": 0.0}


def test_a_coarse_cpu_clock_gives_no_negative_time(
    instructions: dict[str, Instruction], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU time may advance by a whole step during a shorter task."""
    ticks = iter(range(100))
    times = HostTimes(["sleep"])
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))
    times.start(instructions["sleep"], 0)
    times.stop(instructions["sleep"], 0)
    times.keep(range(1000))
    assert times.blocked_s == {"sleep": 0.0}


def test_warm_up_does_not_count(host: TimedHost, instructions: dict[str, Instruction]) -> None:
    """Runs of iterations outside the range are dropped."""
    times = HostTimes(["sleep", "spin"])
    ins = instructions["sleep"]
    times.start(ins, 3)
    host.sleep(0.05)
    times.stop(ins, 3)
    run(host, times, instructions, 4)
    times.keep(range(4, 1000))
    assert times.host_s["sleep"] == pytest.approx(0.01)


def test_other_tasks_are_not_timed(host: TimedHost, instructions: dict[str, Instruction]) -> None:
    """Nor are ``<admit>`` and ``<retire>``."""
    times = HostTimes(["spin"])
    run(host, times, instructions, 0)
    times.start(instructions["<admit>"], 0)
    times.stop(instructions["<admit>"], 0)
    times.keep(range(1000))
    assert list(times.host_s) == ["spin"]
