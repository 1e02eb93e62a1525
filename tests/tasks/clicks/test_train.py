"""Runs of the click job: what is counted, timed and compared, and how it is told."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swpipe.plans.clicks import PLANS
from swpipe.tasks.clicks import (
    ClickConfig,
    ClickDataError,
    ModelConfig,
    TrainingDivergedError,
)
from swpipe.tasks.clicks import (
    training_tables as report,
)
from swpipe.tasks.clicks.compare import Comparison, Speed, compare, speed
from swpipe.tasks.clicks.train import Chunk, Range, TrainRun
from swpipe.tasks.workload import alternate
from tests.tasks.clicks.rows import lines, row

SMALL = ModelConfig(buckets=64, embedding_dim=4, bottom_layers=(8,), cross_rank=3, top_layers=(8,))


@pytest.fixture
def config(small_log: Path) -> ClickConfig:
    """A small model on 50 rows, in 5 batches."""
    return ClickConfig([small_log], batch_size=10, model=SMALL)


@pytest.fixture
def runs(config: ClickConfig) -> Iterator[tuple[TrainRun, TrainRun]]:
    """Under the serial and under the pipelined plan."""
    with (
        TrainRun("serial", config, PLANS["serial"](), 30) as one,
        TrainRun("pipelined", config, PLANS["pipelined"](), 30) as two,
    ):
        yield one, two


def test_a_run_goes_on_where_it_stopped(config: ClickConfig) -> None:
    """Advancing in pieces gives the losses of advancing at once."""
    with (
        TrainRun("pieces", config, PLANS["pipelined"](), 12) as pieces,
        TrainRun("whole", config, PLANS["pipelined"](), 12) as whole,
    ):
        for steps in (1, 4, 2, 5):
            pieces.advance(steps)
        whole.advance(12)
        assert compare(pieces, whole).equal


def test_a_run_ends_with_its_steps(config: ClickConfig) -> None:
    """Asked for more, it takes what there is; asked again, nothing."""
    seen: list[int] = []
    with TrainRun("run", config, PLANS["pipelined"](), 7) as run:
        run.advance(100, lambda: seen.append(1))
        run.advance(100)
        assert len(run.losses) == len(seen) == run.timed_steps == 7
        assert len(run.chunks) == 1


def test_without_steps_a_run_is_one_epoch(config: ClickConfig) -> None:
    """Once through the data."""
    with TrainRun("run", config, PLANS["serial"]()) as run:
        assert run.steps == 5


def test_a_step_has_no_more_rows_than_there_are(config: ClickConfig) -> None:
    """The speed was that of full batches once: 13 million rows per second of 50."""
    config = replace(config, batch_size=10**6)
    with TrainRun("pipelined", config, PLANS["pipelined"](), 3) as run:
        run.advance(3)
        assert run.rows.lines == 50
        assert run.rows_per_s == pytest.approx(50 * run.steps_per_s)


def test_rows_are_counted_once(tmp_path: Path, config: ClickConfig) -> None:
    """Later epochs meet the same malformed rows and do not count them again; few are shown."""
    path = tmp_path / "odd.tsv"
    path.write_bytes(lines(row(), *["bad"] * 7, row()))
    with TrainRun("run", replace(config, data=[path], batch_size=4), PLANS["serial"](), 9) as run:
        run.advance(9)
        assert (run.rows.lines, run.rows.malformed) == (9, 7)
        assert [bad.line for bad in run.rows.examples] == [2, 3, 4, 5, 6]


def test_a_log_without_one_good_row_is_an_error(tmp_path: Path, config: ClickConfig) -> None:
    """The first of its rows is shown."""
    path = tmp_path / "bad.tsv"
    path.write_bytes(lines("bad", "worse"))
    with (
        TrainRun("run", replace(config, data=[path]), PLANS["pipelined"]()) as run,
        pytest.raises(ClickDataError, match=r"not one good row among 2; the first: .*bad\.tsv:1:"),
    ):
        run.advance(1)


def test_every_call_makes_a_chunk(runs: tuple[TrainRun, TrainRun]) -> None:
    """It has the steps and the wall time of that call."""
    for run in runs:
        run.advance(10)
        run.advance(10)
        assert [chunk.steps for chunk in run.chunks] == [10, 10]
        assert all(chunk.seconds > 0 for chunk in run.chunks)


def test_runs_of_the_same_config_are_equal_whatever_the_plan(
    runs: tuple[TrainRun, TrainRun],
) -> None:
    """By losses and parameters, bit for bit."""
    alternate(runs, 30, chunk=7, warm_up=3)
    result = compare(*runs)
    assert result.equal
    assert len(runs[0].losses) == 30
    assert report.format_comparison(*runs, result) == (
        "serial and pipelined: bit-equal: 30 losses and 37 parameters"
    )


def test_one_bit_is_a_difference(runs: tuple[TrainRun, TrainRun]) -> None:
    """In a loss or in a parameter; the first step and the parameter are named."""
    for run in runs:
        run.advance(10)
    one, two = runs
    two.losses[4] = torch.nextafter(two.losses[4], torch.tensor(math.inf))
    assert compare(one, two) == Comparison(4, ())
    assert "losses differ from step 4 on" in report.format_comparison(one, two, compare(one, two))
    two.losses[4] = one.losses[4]
    name, parameter = next(iter(two.job.model.named_parameters()))
    with torch.no_grad():
        parameter[0, 0] = torch.nextafter(parameter[0, 0], torch.tensor(math.inf))
    result = compare(one, two)
    assert result == Comparison(None, (name,))
    text = report.format_comparison(one, two, result)
    assert "NOT EQUAL: all 10 losses are equal; 1 parameters differ" in text


def test_another_seed_is_another_run(config: ClickConfig) -> None:
    """The comparison can tell."""
    with (
        TrainRun("a", config, PLANS["serial"](), 3) as one,
        TrainRun("b", replace(config, seed=1), PLANS["serial"](), 3) as two,
    ):
        one.advance(3)
        two.advance(3)
        result = compare(one, two)
        assert result.first_loss == 0
        assert not result.equal


def test_runs_of_different_length_cannot_be_compared(runs: tuple[TrainRun, TrainRun]) -> None:
    """The error says how long each is."""
    runs[0].advance(2)
    runs[1].advance(3)
    with pytest.raises(ValueError, match="serial ran 2 steps and pipelined 3"):
        compare(*runs)


def test_turns_are_taken_fairly(runs: tuple[TrainRun, TrainRun]) -> None:
    """The order changes from turn to turn; warming up is not timed; every step is taken."""
    turns: list[str] = []
    for run in runs:
        _note_turns(run, turns)
    alternate(runs, 25, chunk=10, warm_up=5)
    assert turns == ["serial", "pipelined", "serial", "pipelined", "pipelined", "serial"]
    assert [[chunk.steps for chunk in run.chunks] for run in runs] == [[5, 10, 10], [5, 10, 10]]
    assert [[chunk.steps for chunk in run.timed] for run in runs] == [[10, 10], [10, 10]]
    assert [len(run.losses) for run in runs] == [25, 25]


def _note_turns(run: TrainRun, turns: list[str]) -> None:
    advance = run.advance

    def noting(steps: int, on_step: object = None, *, timed: bool = True) -> None:
        turns.append(run.name)
        advance(steps, timed=timed)

    run.advance = noting  # type: ignore[method-assign, assignment]


def test_few_steps_are_timed_all_the_same(runs: tuple[TrainRun, TrainRun]) -> None:
    """With no more steps than warming up takes, those are what there is."""
    alternate(runs, 4, warm_up=10)
    assert [run.timed_steps for run in runs] == [4, 4]


def _timed(run: TrainRun, *steps_per_s: float) -> None:
    """Give a run turns of these speeds."""
    run.losses = [torch.tensor(0.0)]
    run.chunks = [Chunk(1, 1 / speed) for speed in steps_per_s]


def test_speed_is_relative_to_the_other_run(runs: tuple[TrainRun, TrainRun]) -> None:
    """Medians over the turns; a run is as fast as itself."""
    _timed(runs[0], 10, 8, 16)
    _timed(runs[1], 20, 32, 24)
    result = speed(*runs)
    assert result == Speed(ratio=2.4, between=Range(20 / 16, 32 / 8))
    assert report.format_speed(*runs, result) == (
        "pipelined over serial: 2.40 (1.25 to 4.00) times as many steps per second"
    )
    assert speed(runs[0], runs[0]).ratio == 1


@pytest.mark.parametrize("scale", [0.001, 0.1, 1, 100, 10**5])
def test_the_ratio_is_that_of_the_speeds_in_the_table(
    runs: tuple[TrainRun, TrainRun], scale: float
) -> None:
    """The table showed 14.9 and 18.4, and the next line "1.16 times as many".

    The table had the median of each run, and the line the median of the ratios of turns.
    """
    _timed(runs[0], 14.9 * scale, 13.1 * scale, 17.7 * scale)
    _timed(runs[1], 21.5 * scale, 18.4 * scale, 17.9 * scale)
    *_, serial, pipelined = [line.split() for line in report.format_runs(runs).splitlines()]
    shown = [float(serial[column]) for column in (2, 3, 5)]
    assert shown == pytest.approx([14.9 * scale, 13.1 * scale, 17.7 * scale])
    told = report.format_speed(*runs, speed(*runs))
    figures = [float(word) for word in re.findall(r"\d+\.\d+", told)]
    by_table = [
        float(pipelined[2]) / float(serial[2]),
        float(pipelined[3]) / float(serial[5]),
        float(pipelined[5]) / float(serial[3]),
    ]
    assert figures == pytest.approx(by_table, abs=0.006)


@pytest.mark.parametrize(
    ("serial", "pipelined", "why"),
    [
        ([5], [50], "one turn has no range; train for more steps"),
        ([5, 6], [6, 7], "the ranges of steps per second overlap"),
        ([5, 6, 4], [9, 5.5, 9], "the ranges of steps per second overlap"),
        ([5, 6, 4], [4.5, 3, 2], "the ranges of steps per second overlap"),
    ],
)
def test_no_plan_is_called_faster_within_the_noise(
    runs: tuple[TrainRun, TrainRun], serial: list[float], pipelined: list[float], why: str
) -> None:
    """Where any turn of the slower run was as fast as one of the other, there is no figure."""
    _timed(runs[0], *serial)
    _timed(runs[1], *pipelined)
    told = report.format_speed(*runs, speed(*runs))
    assert told == f"pipelined over serial: no difference was measured: {why}"


def test_a_slower_plan_is_called_slower(runs: tuple[TrainRun, TrainRun]) -> None:
    """As plainly as a faster one."""
    _timed(runs[0], 10, 11, 12)
    _timed(runs[1], 5, 6, 7)
    assert "pipelined over serial: 0.55 (0.42 to 0.70) times" in report.format_speed(
        *runs, speed(*runs)
    )


def test_a_run_that_diverges_says_so(config: ClickConfig) -> None:
    """Also when the last steps, at which nobody had looked yet, went wrong."""
    with TrainRun("run", config, PLANS["serial"](), 3) as run:
        run.job.guard.interval = 100
        with torch.no_grad():
            next(run.job.model.parameters()).fill_(math.nan)
        with pytest.raises(TrainingDivergedError, match="at step 0"):
            run.advance(3)


def test_a_run_is_told_in_a_line(runs: tuple[TrainRun, TrainRun]) -> None:
    """Speed, loss and AUC, a line for each run."""
    for run in runs:
        run.advance(10)
    head, rule, *rest = report.format_runs(runs).splitlines()
    assert head.split() == ["plan", "steps", "steps/s", "range", "rows/s", "loss", "AUC"]
    assert set(rule) == {"-", " "}
    assert [text.split()[:2] for text in rest] == [["serial", "10"], ["pipelined", "10"]]


def test_malformed_rows_are_told(tmp_path: Path, config: ClickConfig) -> None:
    """How many of how many, and the first of them with file and line."""
    path = tmp_path / "odd.tsv"
    path.write_bytes(lines(row(), *["bad"] * 7, row()))
    with TrainRun("run", replace(config, data=[path]), PLANS["serial"]()) as run:
        run.advance(1)
        told = report.format_rows(run.rows).splitlines()
    assert told[0] == "9 rows, 7 of them malformed and dropped:"
    assert told[1].endswith("odd.tsv:2: 1 fields; a row has 40")
    assert told[-1] == "  ... and 2 more"
