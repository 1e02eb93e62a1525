"""Time on the thread, and off the CPU."""

from __future__ import annotations

import time

import pytest

from swpipe import PipelinePlan, PipelineTask
from swpipe.profiler.host import HostTimes
from swpipe.program import Instruction, compile_plan


def sleep(ctx: object) -> None:
    """Off the CPU."""
    time.sleep(0.01)


def spin(ctx: object) -> None:
    """On the CPU."""
    end = time.thread_time() + 0.01
    while time.thread_time() < end:
        pass


TASKS = [PipelineTask("sleep", sleep), PipelineTask("spin", spin)]


@pytest.fixture
def instructions() -> dict[str, Instruction]:
    """What observers are told of."""
    return compile_plan(PipelinePlan.serial(TASKS), streams=False).instructions


def run(times: HostTimes, instructions: dict[str, Instruction], iteration: int) -> None:
    """All tasks, observed."""
    for task in TASKS:
        times.arrive(instructions[task.name], iteration)
        times.start(instructions[task.name], iteration)
        task.fn(None)  # type: ignore[arg-type]
        times.stop(instructions[task.name], iteration)


def test_sleeping_blocks_and_computing_does_not(instructions: dict[str, Instruction]) -> None:
    """Both hold the thread; only one of them leaves the CPU."""
    times = HostTimes(["sleep", "spin"])
    for iteration in range(5):
        run(times, instructions, iteration)
    times.keep(range(1000))
    assert times.host_s["sleep"] >= 0.01
    assert times.host_s["spin"] >= 0.0099
    assert times.blocked_s["sleep"] >= 0.8 * times.host_s["sleep"]
    # Other work on the machine may push it off the CPU.
    assert times.blocked_s["spin"] <= times.host_s["spin"] - 0.009


def test_a_coarse_clock_makes_no_time_negative(
    instructions: dict[str, Instruction], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a thread's CPU time comes in steps, a tick may fall into a shorter task."""
    ticks = iter(range(100))
    times = HostTimes(["sleep"])
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))
    times.start(instructions["sleep"], 0)
    times.stop(instructions["sleep"], 0)
    times.keep(range(1000))
    assert times.blocked_s == {"sleep": 0.0}


def test_warm_up_does_not_count(instructions: dict[str, Instruction]) -> None:
    """Iterations before the one named are forgotten."""
    times = HostTimes(["sleep", "spin"])
    ins = instructions["sleep"]
    times.start(ins, 3)
    time.sleep(0.05)
    times.stop(ins, 3)
    run(times, instructions, 4)
    times.keep(range(4, 1000))
    assert 0.01 <= times.host_s["sleep"] < 0.05


def test_tasks_that_were_not_asked_for_pass_unnoticed(
    instructions: dict[str, Instruction],
) -> None:
    """Nor do swpipe's own turns count."""
    times = HostTimes(["spin"])
    run(times, instructions, 0)
    times.start(instructions["<admit>"], 0)
    times.stop(instructions["<admit>"], 0)
    times.keep(range(1000))
    assert list(times.host_s) == ["spin"]
