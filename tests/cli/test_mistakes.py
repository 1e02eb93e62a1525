"""Mistakes at the command line: told in one line, before any work is done."""

from __future__ import annotations

import os
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.cli import launched
from tests.cli.test_cli import log, needs_clicks, needs_matplotlib, refused, run
from tests.support.scripts import Script, Scripts
from tests.tasks.clicks.rows import lines, row, write_log

__all__ = ["log"]  # the fixture

RANKS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def as_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that torchrun sets, as a container of a cluster may have them."""
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan of one task."""
    path = tmp_path / "plan.toml"
    PipelinePlan({"a": TaskSchedule()}).save(path)
    return path


# ------------------------------------------------------------------- ranks


@pytest.mark.usefixtures("as_a_rank")
@pytest.mark.parametrize("args", [(), ("--help",), ("train", "--help"), ("plan", "show", "PLAN")])
def test_what_needs_no_ranks_waits_for_none(args: tuple[str, ...], plan: Path) -> None:
    """Help once waited for ever, without a word, for ranks that nobody had started."""
    assert run(*(plan if arg == "PLAN" else arg for arg in args)) == 0


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_do_not_come_are_told_and_not_waited_for(scripts: Scripts, rank: str) -> None:
    """Whether this rank holds the store or has to find it."""
    script = (
        "import swpipe.cli.launched as launched; launched.JOIN_S = 0.2; "
        "from swpipe.cli import main; main(['plan', 'infer'])"
    )
    environment = {**RANKS, "RANK": rank, "MASTER_PORT": "0" if rank == "0" else "9"}
    ended = scripts.run(Script(script, environment=environment))
    first, second = ended.stderr.splitlines()
    assert f"RANK is set: rank {rank} of 2" in first
    assert "waits at most 0.2 s for the others" in first
    assert "cannot join the others: no answer within 0.2 s; start all ranks, or unset" in second
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.usefixtures("as_a_rank")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "x"),
        ("RANK", "2"),
        ("RANK", "-1"),
        ("RANK", "\x1b[31m"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "1" * 5000),
        ("MASTER_PORT", "65536"),
        ("LOCAL_RANK", "one"),
    ],
)
def test_a_variable_that_torchrun_would_not_set_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """By name; some ended in a traceback once."""
    monkeypatch.setenv(name, value)
    line = refused(capsys, "train")
    assert line.startswith(f"swpipe: {name}=")
    assert "torchrun sets an integer from" in line
    assert line.isprintable()


@pytest.mark.usefixtures("as_a_rank")
def test_under_torchrun_every_command_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one line tells all ranks of a command that makes no sense there."""
    assert not launched.joins(["demo"])
    assert launched.joins(["profile"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    assert launched.joins(["demo"])
    assert not launched.joins(["demo", "--help"])


# ------------------------------------------------------------------- outputs


@needs_matplotlib
@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("train", "--data", "LOG"), "--timeline"),
        (("profile", "--data", "LOG"), "--output"),
        (("plan", "show", "PLAN"), "--output"),
        (("plan", "infer", "--data", "LOG"), "--output"),
        (("plan", "simulate", "PLAN", "--data", "LOG"), "--timeline"),
        (("plan", "simulate", "PLAN", "--data", "LOG"), "--keep-costs"),
        (("plan", "simulate", "PLAN", "--data", "LOG"), "--picture"),
        (("plan", "auto", "--data", "LOG"), "--keep-costs"),
        (("plan", "auto", "--data", "LOG"), "--output"),
        (("demo",), "--directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_first(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    log: Path,
    plan: Path,
    command: tuple[str, ...],
    option: str,
) -> None:
    """It was found after the training once, and the result was lost in a traceback."""
    (tmp_path / "file").touch()
    args = [{"LOG": log, "PLAN": plan}.get(arg, arg) for arg in command]
    target = tmp_path / "file" / "out.png"
    assert run(*args, option, target) == 2
    told = capsys.readouterr()
    assert str(tmp_path / "file") in told.err
    assert len(told.err.splitlines()) == 1
    assert told.out == ""


@needs_clicks
def test_a_folder_that_is_missing_is_made(log: Path, tmp_path: Path) -> None:
    """Before the training."""
    timeline = tmp_path / "new" / "folder" / "timeline.json"
    assert run("train", "--data", log, "--batch-size", 20, "--timeline", timeline) == 0
    assert timeline.stat().st_size > 0


@needs_clicks
def test_a_full_disk_loses_no_result(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    """What was printed stays, and the line says which file is missing."""
    args = ("train", "--data", log, "--batch-size", 20, "--timeline", "/dev/full")
    assert run(*args) == 2
    told = capsys.readouterr()
    assert "steps/s" in told.out
    assert told.err.splitlines()[-1] == "swpipe: /dev/full: No space left on device"


def test_where_one_file_fails_the_others_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, plan: Path
) -> None:
    """The timeline, after a full disk took the costs."""
    costs, timeline = tmp_path / "costs.json", tmp_path / "timeline.json"
    costs.write_text('{"tasks": {"a": {"host_us": 1}}}')
    args = ("plan", "simulate", plan, "--costs", costs, "--timeline", timeline)
    line = refused(capsys, *args, "--keep-costs", "/dev/full")
    assert line == "swpipe: /dev/full: No space left on device"
    assert timeline.stat().st_size > 0


def test_a_picture_of_an_unknown_kind_is_refused(
    capsys: pytest.CaptureFixture[str], plan: Path
) -> None:
    """By its name, before anything is drawn."""
    line = refused(capsys, "plan", "simulate", plan, "--picture", "out.exe")
    assert "pictures are .png, .svg, .pdf files" in line


def test_a_full_standard_output_is_told(plan: Path) -> None:
    """In one line, and not in a traceback."""
    command = [sys.executable, "-m", "swpipe", "plan", "show", str(plan)]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "swpipe: standard output: No space left on device\n"


def test_a_reader_may_stop_reading(plan: Path) -> None:
    """As ``| head`` does: no line, no traceback."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "swpipe", "plan", "show", str(plan)]
    with os.fdopen(writes, "w") as closed:
        ended = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (ended.returncode, ended.stderr) == (1, "")


# ------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("train", "--seed", "-1"), "'--seed': "),
        (("train", "--seed", 2**63), "'--seed': "),
        (("train", "--seed", 2**70), "'--seed': "),
        (("demo", "--seed", "-1"), "'--seed': "),
        (("train", "--steps", 2**70), "'--steps': "),
        (("train", "--batch-size", 10**12), "'--batch-size': "),
        (("train", "--device", "meta"), "--device meta: device 'meta' is not on this machine"),
        (("profile", "--device", "meta"), "--device meta: "),
        (("plan", "infer", "--device", "meta"), "--device meta: "),
        (("train", "--device", "\x1b[31m"), "--device '\\x1b[31m': "),
        pytest.param(("train", "--data", "\x1b[31m"), "\\x1b[31m", marks=needs_clicks),
        (("plan", "show", "\x1b[31m\n"), "plan '\\x1b[31m\\n': "),
        (("plan", "show", "pipelined", "--periods", 10**9), "'--periods': "),
        (("plan", "simulate", "pipelined", "--width", 10**9), "'--width': "),
        (("plan", "infer", "--workload", "\x1b:f"), "workload '\\x1b:f': "),
        (("plan", "infer", "--workload", ":"), "name it as module:function"),
        (("profile", "--workload", "my_loop.py:loop"), "name it as module:function"),
        (("trace", "\x1b[31m.json"), "\\x1b[31m.json"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], args: tuple[object, ...], said: str
) -> None:
    """In one line that a terminal can show; several ended in a traceback once."""
    line = refused(capsys, *args)
    assert said in line
    assert line.isprintable()


@needs_clicks
def test_one_plan_is_compared_with_itself(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    """It ran once only, and nothing said so."""
    args = ("train", "--data", log, "--batch-size", 20, "--compare", "serial,serial")
    assert run(*args) == 0
    assert "serial and serial (2): bit-equal: 3 losses" in capsys.readouterr().out


@needs_clicks
def test_a_log_cannot_speak_to_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A field of a malformed row is shown with its escape codes taken apart."""
    path = tmp_path / "odd.tsv"
    path.write_bytes(lines(row({0: "\x1b]0;title\x07"}), row()))
    assert run("train", "--data", path, "--batch-size", 2) == 0
    out = capsys.readouterr().out
    assert "\\x1b]0;title\\x07" in out
    assert out.replace("\n", "").isprintable()


@needs_clicks
def test_a_log_that_goes_away_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when it was indexed, and is gone when it is read."""
    from swpipe.tasks.clicks import ClickJob

    path = write_log(tmp_path / "log.tsv", 40)
    read = ClickJob.read

    def remove_and_read(job: ClickJob, ctx: object) -> None:
        path.unlink(missing_ok=True)
        read(job, ctx)  # type: ignore[arg-type]

    monkeypatch.setattr(ClickJob, "read", remove_and_read)
    assert "No such file or directory" in refused(capsys, "train", "--data", path)


def test_a_terminal_that_knows_few_characters_is_given_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Names outside of latin-1 ended in a traceback once."""
    PipelinePlan({"läd\u65e5": TaskSchedule()}).save(tmp_path / "plan.toml")
    out = TextIOWrapper(BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    assert run("plan", "show", tmp_path / "plan.toml") == 0
    out.seek(0)
    assert "läd?" in out.read()
