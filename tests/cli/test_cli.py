"""The command line, from the outside: what it prints, writes and answers."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch

import swpipe
from swpipe import PipelinePlan, TaskSchedule
from swpipe.cli import main
from swpipe.cli.options import spread_lists
from swpipe.plans.clicks import PLANS
from swpipe.tasks.clicks.clicks_workload import cache_home
from tests.tasks.clicks.rows import lines, row, varied_row, write_log

needs_clicks = pytest.mark.skipif(
    find_spec("torchrec") is None or find_spec("polars") is None,
    reason="needs swpipe[clicks] and TorchRec",
)
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs swpipe[plot]")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of 60 good rows."""
    return write_log(tmp_path / "log.tsv", 60)


def run(*args: object) -> int:
    """Run the command line; its exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    code = caught.value.code
    assert isinstance(code, int)
    return code


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Run what must be refused: exit code 2 and one line after its progress; the line."""
    assert run(*args) == 2
    told = capsys.readouterr().err.splitlines()
    progress = re.compile(r"\s*$|training|tuning|trying|(\S+: )?(recording|measuring) ")
    told = [line for line in told if not progress.match(line)]
    assert len(told) == 1
    assert told[0].startswith("swpipe: ")
    return told[0]


def out(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """What a command prints that succeeds."""
    assert run(*args) == 0
    return capsys.readouterr().out


# ------------------------------------------------------------------- train


@needs_clicks
def test_both_plans_train_bit_equal(
    capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path
) -> None:
    """On several logs, one after the other, each on one thread; they are evaluated on others."""
    more = write_log(tmp_path / "more.tsv", 25, seed=1)
    torch.set_num_threads(2)
    args = ("--data", log, more, "--held-out", more, "--batch-size", 8)
    try:
        said = out(capsys, "train", *args, "--compare", "serial,pipelined")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)
    assert re.search(r"serial and pipelined: bit-equal: \d+ losses and 37 parameters", said)
    assert "data: 85 rows, none malformed" in said
    assert "held-out rows: AUC " in said


@needs_clicks
def test_a_plan_may_come_from_a_file(
    capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path
) -> None:
    """What ``swpipe plan show`` wrote can be trained under; a plan is compared with itself, too."""
    file = tmp_path / "plan.toml"
    out(capsys, "plan", "show", "pipelined", "--output", file)
    assert PipelinePlan.load(file) == PLANS["pipelined"]()
    args = ("train", "--data", log, "--batch-size", 20, "--compare", f"serial,{file},serial")
    said = out(capsys, *args)
    assert "plan.toml: bit-equal" in said
    assert "serial and serial (2): bit-equal: 3 losses" in said


@needs_clicks
def test_the_seed_decides_the_losses(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    """The same seed prints the same loss, another one another; steps go through a log again."""
    told = []
    for seed in (3, 3, 4):
        args = ("--data", log, "--batch-size", 20, "--steps", 7, "--seed", seed)
        name, steps, *rest = out(capsys, "train", *args).splitlines()[2].split()
        assert (name, steps) == ("pipelined", "7")
        told.append(rest[3:])
    assert told[0] == told[1] != told[2]


@needs_clicks
def test_without_data_a_log_is_made_up_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept in the cache directory, and evaluated on its held-out part."""
    from swpipe.tasks.clicks import generate

    monkeypatch.setattr(generate, "TRAIN_ROWS", 400)
    monkeypatch.setattr(generate, "HELD_OUT_ROWS", 100)
    args = ("train", "--cache-dir", tmp_path / "cache", "--batch-size", 100)
    assert run(*args) == 0
    out = capsys.readouterr().out
    assert "held-out rows: AUC" in out
    assert "data: 400 rows, none malformed" in out
    stamps = [path.stat().st_mtime_ns for path in sorted((tmp_path / "cache").iterdir())]
    assert run(*args) == 0
    assert stamps == [path.stat().st_mtime_ns for path in sorted((tmp_path / "cache").iterdir())]
    assert len(stamps) == 2


@needs_clicks
def test_malformed_rows_are_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With file and line, and no escape codes; with ``--strict`` the first is an error."""
    path = tmp_path / "odd.tsv"
    draw = random.Random(0)
    odd = row({0: "\x1b]0;title\x07"})
    path.write_bytes(lines(varied_row(draw), row({0: "7"}), varied_row(draw), "x", odd))
    said = out(capsys, "train", "--data", path, "--batch-size", 2)
    assert "data: 5 rows, 3 of them malformed and dropped:" in said
    assert f"{path}:2: label 7 is not 0 or 1" in said
    assert f"{path}:4: 1 fields; a row has 40" in said
    assert "\\x1b]0;title\\x07" in said
    assert said.replace("\n", "").isprintable()
    for plan in ("serial", "pipelined"):  # from whichever thread
        told = refused(capsys, "train", "--data", path, "--strict", "--plan", plan)
        assert "odd.tsv:2: label 7 is not 0 or 1" in told


@needs_clicks
def test_a_diverging_loss_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, and the step is named."""
    from swpipe.tasks.clicks import ClickJob

    def diverge(job: ClickJob, ctx: object) -> None:
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.fill_(torch.nan)

    monkeypatch.setattr(ClickJob, "step", diverge)
    assert run("train", "--data", log, "--batch-size", 20) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "the loss became NaN or infinite at step 1" in told


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


@needs_clicks
def test_a_full_disk_loses_no_result(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    """What was printed stays, and the line says which file is missing."""
    args = ("train", "--data", log, "--batch-size", 20, "--timeline", "/dev/full")
    assert run(*args) == 2
    told = capsys.readouterr()
    assert "steps/s" in told.out
    assert told.err.splitlines()[-1] == "swpipe: /dev/full: No space left on device"


# ------------------------------------------------------- timeline


@needs_clicks
@needs_matplotlib
def test_a_timeline_is_recorded_and_drawn(
    capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path
) -> None:
    """``train --timeline`` writes JSON, ``trace`` makes a picture of it."""
    timeline = tmp_path / "new" / "timeline.json"
    assert run("train", "--data", log, "--batch-size", 10, "--timeline", timeline) == 0
    assert json.loads(timeline.read_text())
    assert run("trace", timeline) == 0
    assert timeline.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "initiation interval" in out
    assert run("trace", timeline, "--output", tmp_path / "other.svg") == 0
    assert "<svg" in (tmp_path / "other.svg").read_text()


def test_a_plan_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Who works on which iteration when, and who waits for whom; no data is needed."""
    said = out(capsys, "plan", "show", "pipelined", "--periods", 4)
    assert "read [io]            0   1   2   3" in said
    assert "forward [default]    .   0   1   2" in said
    assert "depth 3" in said
    assert "\nio: wait(default.<admit>" in said


# ------------------------------------------------------------------ around the commands


@needs_clicks
def test_a_job_without_its_libraries_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what is missing, and what to install."""
    for name in [name for name in sys.modules if f"{name}.".startswith("swpipe.tasks.clicks.")]:
        if not name.endswith("_workload"):  # which has registered it
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "polars", None)
    told = refused(capsys, "train")
    assert "the click job needs polars: pip install 'swpipe[clicks]' torchrec" in told


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output, alone."""
    assert out(capsys, "--version") == f"swpipe {swpipe.__version__}\n"


def test_the_shell_completes_commands_and_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of workloads too, which are declared when the command line starts.

    The help names the option that installs the script, which the shell reads when it starts.
    """
    assert "--install-completion" in out(capsys, "--help")
    monkeypatch.setenv("_SWPIPE_COMPLETE", "complete_bash")
    for words, number, completed in [
        ("swpipe plan si", 2, {"simulate"}),
        ("swpipe profile --batch", 2, {"--batches", "--batch-size"}),
    ]:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(number))
        assert set(out(capsys).split()) == completed
    for shell in ("bash", "zsh", "fish"):
        monkeypatch.setenv("_SWPIPE_COMPLETE", f"source_{shell}")
        assert f"complete_{shell}" in out(capsys)


COMMANDS = {
    "": {"train", "profile", "trace", "report", "diff", "demo", "plan"},
    "plan": {"show", "infer", "check", "simulate", "auto"},
}


def every_command() -> Iterator[list[str]]:
    """The words of each command."""
    for group, names in COMMANDS.items():
        yield from ([*group.split(), name] for name in ["", *sorted(names - {"plan"})])


@pytest.mark.parametrize("words", list(every_command()), ids=" ".join)
def test_help_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Of 80 columns: no sentence is cut off, no limit is told that nobody reaches."""
    monkeypatch.setenv("COLUMNS", "80")
    said = out(capsys, *filter(None, words), "--help")
    lines = said.splitlines()[1:]  # the usage has dots of its own
    assert [line for line in lines if len(line) > 80 or line.endswith("...")] == []
    assert "<=" not in said
    if words[-1] == "":
        found = re.findall(r"^  (\w+)  ", said.partition("Commands:")[2], re.MULTILINE)
        assert set(found) == COMMANDS[words[0]]


def test_help_shows_the_options_of_the_named_workload(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the usual one where a command has one, and of no other."""

    def shown(*args: str) -> tuple[bool, bool]:
        said = out(capsys, *args, "--help")
        return "--batch-size" in said, "--seed" in said

    assert shown("train") == shown("plan", "auto") == (True, True)
    assert shown("report") == shown("trace") == (False, False)
    for name, options in {"clicks": (True, True), "images": (False, True)}.items():
        assert shown("train", "--workload", name) == options
        assert shown("trace", f"--workload={name}") == options
        assert shown("report", name) == options


def test_options_that_take_a_list_are_spread() -> None:
    """The parser wants the option before each value; people do not."""
    for args, spread in {
        "--data a b --steps 3": "--data a --data b --steps 3",
        "--held-out a b": "--held-out a --held-out b",
        "--plan x y": "--plan x y",
        "--data=a b": "--data=a b",
        "--data": "--data",
    }.items():
        assert spread_lists(args.split(), {"--data", "--held-out"}) == spread.split()


def test_a_made_up_log_is_kept_where_the_user_keeps_such_things(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The variable was misspelt once, and never heard. A relative path counts for nothing."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_home() == tmp_path / "caches"
    for nowhere in ("", "caches"):
        monkeypatch.setenv("XDG_CACHE_HOME", nowhere)
        assert cache_home() == tmp_path / "home" / ".cache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_home() == tmp_path / "home" / ".cache"


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
