"""``StepTimes`` times every step, reports percentiles, and finds the slowest rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import swpipe.trace.step_times
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.plans import prefetch_plan
from swpipe.trace import StepTimes
from tests.profiler.sleepers import sleepers
from tests.support.ranks import Ranks
from tests.support.virtual_clock import TimedHost, tell_time


@pytest.fixture(autouse=True)
def timed(host: TimedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the step times."""
    monkeypatch.setattr(swpipe.trace.step_times, "time", host)


def step_that_takes(host: TimedHost) -> PipelinePlan:
    """Return a task that takes as many milliseconds as its batch says."""
    task = PipelineTask("train", lambda ctx: host.sleep(ctx.batch / 1e3))
    return PipelinePlan.serial([task])


def test_the_percentiles_are_those_of_the_steps(host: TimedHost) -> None:
    """Of 100 steps of 1 to 100 ms, the median is 50 ms and 99 take at most 99 ms."""
    times = StepTimes()
    with SWPipeline(step_that_takes(host)) as pipe, pipe.observe(times):
        pipe.run(range(101))  # the first begins when nothing has been handed out yet
    assert times.summary() == pytest.approx({"p50_ms": 50.0, "p99_ms": 99.0})


def test_only_the_last_steps_count(host: TimedHost) -> None:
    """Slow steps are forgotten after ``last`` others."""
    times = StepTimes(last=3)
    with SWPipeline(step_that_takes(host)) as pipe, pipe.observe(times):
        pipe.run([500, 500, 500, 2, 2, 2])
    assert times.summary() == pytest.approx({"p50_ms": 2.0, "p99_ms": 2.0})


@pytest.mark.parametrize("pulled", ["by the caller", "by a group"])
def test_what_lies_between_two_passes_is_no_step(host: TimedHost, pulled: str) -> None:
    """An evaluation between two passes is in no figure, nor is the filling after it."""
    tasks = sleepers(host, decode=1, train=3)
    group = {"pull_group": "loader"} if pulled == "by a group" else {"pull_group": None}
    times = StepTimes()
    with SWPipeline(prefetch_plan(tasks[:1], tasks[1:], **group), tasks) as pipe:
        with pipe.observe(times):
            pipe.run(range(5))
            host.sleep(10)
            pipe.run(range(5))
    assert times.summary() == pytest.approx({"p50_ms": 3.0, "p99_ms": 3.0})


class Writer:
    """A TensorBoard writer that keeps its input."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.rows.append((tag, value, step))


def test_reports_reach_all_sinks(host: TimedHost, tmp_path: Path) -> None:
    """A file, a TensorBoard writer and a function get the same figures, every few steps."""
    writer, logged = Writer(), []
    file = tmp_path / "steps.jsonl"

    def log(values: dict[str, float], step: int) -> None:
        logged.append((values, step))

    times = StepTimes(file, writer, log, every=2)
    with SWPipeline(step_that_takes(host)) as pipe, pipe.observe(times):
        pipe.run([1, 4, 4, 4, 4])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [pytest.approx({"step": step, "p50_ms": 4.0, "p99_ms": 4.0}) for step in (2, 4)]
    assert [step for _, step in logged] == [2, 4]
    assert logged[0][0] == pytest.approx({"swpipe/p50_ms": 4.0, "swpipe/p99_ms": 4.0})
    assert [(tag, step) for tag, _, step in writer.rows[:2]] == [
        ("swpipe/p50_ms", 2),
        ("swpipe/p99_ms", 2),
    ]


def test_a_sink_that_fails_does_not_stop_training(host: TimedHost) -> None:
    """It is dropped, with a warning; the other sinks and the training go on."""
    steps: list[int] = []

    def broken(values: Any, step: int) -> None:
        raise OSError("no route to the tracker")

    times = StepTimes(broken, lambda values, step: steps.append(step), every=1)
    with SWPipeline(step_that_takes(host)) as pipe, pipe.observe(times):
        with pytest.warns(RuntimeWarning, match="no route to the tracker") as told:
            pipe.run([1, 1, 1, 1])
    assert steps == [1, 2, 3]
    assert len(told) == 1


def test_what_is_no_sink_is_refused() -> None:
    """A sink is a path, a writer or a function; numbers are 1 or more."""
    with pytest.raises(TypeError, match="add_scalar"):
        StepTimes(3)
    with pytest.raises(ValueError, match="every is 0"):
        StepTimes(every=0)


def uneven(number: int) -> list[dict[str, float]]:
    """Return this rank's reports, with rank 1 slower, and earlier with its report."""
    rows: list[dict[str, float]] = []
    host = TimedHost()
    with pytest.MonkeyPatch.context() as patch:
        tell_time(patch, host)
        patch.setattr(swpipe.trace.step_times, "time", host)
        times = StepTimes(lambda values, step: rows.append(values), every=3)

        def train(ctx: IterContext) -> None:
            host.sleep((2 + 5 * dist.get_rank()) / 1e3)
            if ctx.iter_idx == 4 and dist.get_rank() == 0:
                dist.barrier()

        tasks = [PipelineTask("train", train)]
        with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe, pipe.observe(times):
            pipe.run(range(4 if dist.get_rank() else 7))
            dist.barrier()  # rank 0's is the one in its fifth iteration
            if dist.get_rank():
                dist.barrier()
                pipe.run(range(4))  # once rank 0 has reported, too
    return rows


def test_rank_0_reports_the_slowest_rank(two_ranks: Ranks) -> None:
    """It does so once the others have reported, without a collective: no rank waits."""
    first, second = two_ranks.run(uneven, 1)
    assert ["swpipe/worst_rank" in row for row in second] == [False, False]
    assert first[-1] == pytest.approx(
        {
            "swpipe/p50_ms": 2.0,
            "swpipe/p99_ms": 2.0,
            "swpipe/worst_rank": 1,
            "swpipe/worst_p50_ms": 7.0,
            "swpipe/worst_p99_ms": 7.0,
        }
    )
