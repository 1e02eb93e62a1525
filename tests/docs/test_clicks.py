"""The click model of the examples: its log, its plans, its numbers, and its size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from swpipe import PipelinePlan, PipelineTask
from swpipe.analysis import verify
from swpipe.analysis.verification import verify_for_run
from swpipe.inference import record
from tests.cli.test_cli import out
from tests.support.click_example import FOLDER, HAS_POLARS, example
from tests.support.scripts import Script, Scripts

pytestmark = pytest.mark.skipif(not HAS_POLARS, reason="needs polars")

ROWS, BATCH = 100, 16


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return a small generated log."""
    path: Path = example("click_log").generate(tmp_path / "log.tsv", ROWS)
    return path


def job(**given: Any) -> Any:
    """Return a job with small tables."""
    return example("click_job").ClickJob(buckets=64, **given)


def plans() -> dict[str, PipelinePlan]:
    """Return the plans by name."""
    return {name: make() for name, make in example("click_job").PLANS.items()}


def test_it_is_short_and_uses_public_names_only() -> None:
    """It has 400 lines at most, and imports no module that begins with an underscore."""
    files = sorted(FOLDER.glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert len(text.splitlines()) <= 400
    assert re.findall(r"^ *(?:from|import) swpipe\S*\._", text, re.MULTILINE) == []


def test_the_batches_of_a_log_are_all_of_its_lines(log: Path) -> None:
    """They are in order; the last batch is shorter."""
    module = example("click_log")
    batches = module.batches_of(log, BATCH)
    assert len(batches) == 7
    assert b"".join(map(module.read, batches)) == log.read_bytes()
    assert [module.read(lines).count(b"\n") for lines in batches] == [16] * 6 + [4]


def test_rows_without_a_label_are_dropped_and_counted(log: Path) -> None:
    """Any other value that does not parse counts as missing, as an empty one does."""
    module = example("click_log")
    lines = log.read_bytes().splitlines(keepends=True)
    cells = lines[1].split(b"\t")
    odd = b"\t".join([cells[0], b"many", *cells[2:14], b"xyz", *cells[15:]])
    frame, malformed = module.decode(b"".join([b"7" + lines[0][1:], odd, b"\n", lines[2]]))
    assert (frame.height, malformed) == (2, 2)
    assert frame["I1"][0] is None
    assert frame["C1"][0] is None
    batch = example("click_model").encode(frame, 64)
    assert (batch.labels.shape, batch.integers.shape, batch.ids.shape) == ((2,), (2, 13), (2, 26))
    assert batch.ids[0, 0] == 0
    assert int(batch.ids.max()) < 26 * 65


@pytest.mark.parametrize("name", ["serial", "pipelined"])
def test_a_plan_is_proved_by_what_the_tasks_declare(name: str) -> None:
    """This holds with and without streams; only the feed is pure."""
    tasks: tuple[PipelineTask, ...] = tuple(job().tasks())
    plan = plans()[name]
    assert verify(plan, tasks, pull_ahead=True).undeclared == ()
    for streams in (False, True):
        verified = verify_for_run(plan, tasks, None, device="cpu", streams=streams)
        assert verified.proved_by_declarations()
    assert [task.name for task in tasks if task.pure] == ["read", "decode", "hash", "copy"]


def test_a_recording_finds_no_dependence_that_a_plan_lacks(log: Path) -> None:
    """It is made from the tasks on a real batch."""
    batches = example("click_log").batches_of(log, BATCH)
    recording = record(job().tasks(), batches[0], device="cpu")
    for plan in plans().values():
        assert recording.compare(plan).missing == ()


def test_both_plans_train_bit_equal(log: Path) -> None:
    """Losses and parameters are equal; another seed gives others."""
    train = example("train_clicks").train
    batches = example("click_log").batches_of(log, BATCH)
    serial, pipelined, other = (
        train("serial", batches), train("pipelined", batches), train("serial", batches, seed=1)
    )  # fmt: skip
    assert all(map(torch.equal, serial.losses, pipelined.losses))
    assert all(map(torch.equal, serial.parameters, pipelined.parameters))
    assert not torch.equal(serial.losses[0], other.losses[0])


def test_training_lowers_the_loss(log: Path) -> None:
    """It does so in 30 passes over the same rows."""
    train = example("train_clicks").train
    losses = train("pipelined", example("click_log").batches_of(log, BATCH) * 30).losses
    assert torch.stack(losses[-7:]).mean() < 0.9 * torch.stack(losses[:7]).mean()


@pytest.mark.slow
def test_the_script_compares_the_plans(scripts: Scripts, log: Path) -> None:
    """It prints a line for each plan, and that the numbers are equal."""
    args = ["--data", str(log), "--batch-size", "16"]
    path = str(FOLDER / "train_clicks.py")
    done = scripts.run(Script(path=path, args=args, folder=str(log.parent)))
    assert done.returncode == 0, done.stderr
    speed = r"^pipelined +[\d.]+ steps/s   loss [\d.]+ to [\d.]+   0 rows dropped$"
    assert re.search(speed, done.stdout, re.MULTILINE)
    assert "losses and parameters are bit-equal" in done.stdout


def test_the_commands_take_it_as_a_loop(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They name it by module and function, like any other."""
    monkeypatch.setattr(example("click_job"), "log_in", lambda folder: log)
    printed = out(capsys, "plan", "infer", "--workload", "click_job:loop", "--device", "cpu")
    assert re.search(r"^hash +ctx\.frame +ctx\.frame, ctx\.host$", printed, re.MULTILINE), printed
