"""Runs of a job under its plans: turns, comparisons, and their texts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.cli import runs as job_runs
from swpipe.cli.runs import JobRun, report_of, train_in_turns
from swpipe.cli.user_errors import TrainingFailedError, UserError
from swpipe.plans import prefetch_plan

PLANS: dict[str, Any] = {
    "serial": lambda: PipelinePlan.serial(["load", "train"]),
    "pipelined": lambda: prefetch_plan(["load"], ["train"]),
}


class SumJob:
    """A job that learns the sum of its rows."""

    epoch_steps = 5

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1)
        self.batches: Any = count()

    def pipeline(self, plan: PipelinePlan) -> SWPipeline[Any]:
        tasks = PipelineTask("load", self.load, pure=True), PipelineTask("train", self.train)
        return SWPipeline(plan, tasks, device="cpu")

    def load(self, ctx: IterContext) -> None:
        draws = torch.Generator().manual_seed(ctx.batch)
        ctx.x = torch.randn(4, 3, generator=draws)

    def train(self, ctx: IterContext) -> None:
        ctx.loss = (self.model(ctx.x) - ctx.x.sum(1, keepdim=True)).square().mean()
        self.model.zero_grad()
        ctx.loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(0.1 * parameter.grad)


JOB: Any = SumJob


@pytest.fixture
def runs() -> Iterator[list[JobRun]]:
    """Runs under the serial and under the pipelined plan."""
    runs = [JobRun(name, JOB(), make(), 30) for name, make in PLANS.items()]
    with runs[0].pipe, runs[1].pipe:
        yield runs


def test_a_run_goes_on_where_it_stopped(runs: list[JobRun]) -> None:
    """The losses of a run in pieces equal those of one run; it ends after its steps."""
    pieces, whole = runs
    seen: list[int] = []
    for steps in (1, 4, 2, 23):
        pieces.advance(steps, lambda: seen.append(1))
    whole.advance(30)
    assert all(map(torch.equal, pieces.losses, whole.losses))
    assert len(pieces.losses) == len(whole.losses) == len(seen) == 30
    assert len(pieces.turns_s) == 4
    assert all(seconds > 0 for seconds in pieces.turns_s)
    assert JobRun("epoch", JOB(), PLANS["serial"]()).steps == 5


def test_a_run_without_a_batch_is_refused() -> None:
    """It is refused if batches were asked for."""
    job = JOB()
    job.batches = []
    run = JobRun("serial", job, PLANS["serial"](), 1)
    run.advance(0)
    with pytest.raises(UserError, match="plan serial: the workload has no batch"):
        run.advance(1)


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    """It ends at the end of the turn; the error names the first such step."""
    job = JOB()
    run = JobRun("serial", job, PLANS["serial"](), 30)
    run.advance(3)
    with torch.no_grad():
        job.model.bias.fill_(math.inf)
    with pytest.raises(TrainingFailedError, match="at step 3 "):
        run.advance(5)


def test_turns_are_taken_fairly(runs: list[JobRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """The order changes from turn to turn; warming up is not timed; every step is made."""
    turns: list[tuple[str, int]] = []
    advance = JobRun.advance

    def noting(run: JobRun, steps: int, *given: Any, **named: Any) -> None:
        turns.append((run.name, steps))
        advance(run, steps, *given, **named)

    monkeypatch.setattr(JobRun, "advance", noting)
    for name, value in {"_TURN": 10, "_UNTIMED": 5, "_TRACED": 8}.items():
        monkeypatch.setattr(job_runs, name, value)
    trace = train_in_turns(runs)
    assert turns == [
        ("serial", 5), ("pipelined", 5), ("serial", 10), ("pipelined", 10),
        ("pipelined", 7), ("serial", 7), ("serial", 8), ("pipelined", 8),
    ]  # fmt: skip
    assert [(len(run.losses), len(run.turns_s)) for run in runs] == [(30, 2), (30, 2)]
    assert [run.done for run in runs] == [30, 30]
    assert {span.iteration for span in trace.spans if span.task == "train"} == {*range(22, 30)}
    few = JobRun("few", JOB(), PLANS["serial"](), 4)
    train_in_turns([few])
    assert few.steps_per_s > 0  # with no more steps than are recorded, those are what there is


def test_one_bit_is_a_difference(runs: list[JobRun]) -> None:
    """A loss with another bit, and a loss of one run only, count; the first such step is named."""
    one, two = runs
    one.advance(10)
    two.advance(9)
    assert "serial and pipelined: NOT EQUAL: losses differ from step 9 on" in report_of(runs)
    two.advance(1)
    assert "serial and pipelined: bit-equal: 10 losses" in report_of(runs)
    two.losses[4] = torch.nextafter(torch.as_tensor(two.losses[4]), torch.tensor(math.inf))
    assert "NOT EQUAL: losses differ from step 4 on" in report_of(runs)


def _told(runs: list[JobRun], *turns: list[float]) -> list[list[str]]:
    """Return the table's rows and the line on the speed, for turns of these speeds."""
    for run, speeds in zip(runs, turns, strict=True):
        run.losses, run.turns_s = [1.0, 0.5], [1 / speed for speed in speeds]
    head, _, *rest = report_of(runs).splitlines()
    assert head.split() == ["plan", "steps", "steps/s", "range", "loss"]
    return [line.split() for line in rest[:2]] + [rest[2:3]]


def test_the_speed_is_that_of_the_table(runs: list[JobRun]) -> None:
    """The table has each median; the line below has the ratios of neighbouring turns."""
    serial, pipelined, (told,) = _told(runs, [10, 8, 16], [20, 32, 24])
    assert serial[2:9] == ["10", "8", "to", "16", "1.0000", "to", "0.5000"]
    assert pipelined[2:9] == ["24", "20", "to", "32", "1.0000", "to", "0.5000"]
    assert told == "pipelined over serial: 2.00 (1.50 to 4.00) times as many steps per second"
    told = _told(runs, [10, 11, 12], [5, 6, 7])[2][0]
    assert told == "pipelined over serial: 0.55 (0.50 to 0.58) times as many steps per second"


def test_no_plan_is_called_faster_within_the_noise(runs: list[JobRun]) -> None:
    """If it was as slow as the other in one turn, the line says so, with the ratios."""
    more = "times as many steps per second"
    for serial, pipelined, why in [
        ([5], [50], "one turn has no range; train for more steps"),
        ([5, 6], [6, 6], f"from turn to turn 1.10 (1.00 to 1.20) {more}"),
        ([5, 6, 4], [10, 3, 8], f"from turn to turn 2.00 (0.50 to 2.00) {more}"),
        ([5, 6, 4], [4, 3, 4], f"from turn to turn 0.80 (0.50 to 1.00) {more}"),
    ]:
        told = _told(runs, serial, pipelined)[2][0]
        assert told == f"pipelined over serial: no difference was measured: {why}"
