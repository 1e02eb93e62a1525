"""The command line, from the outside: what it prints, writes and answers."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import swpipe
from swpipe import IterContext, PipelinePlan, TaskSchedule, task
from swpipe.cli import main
from swpipe.plans import prefetch_plan
from swpipe.trace import Row, Span, Trace

PLANS = {
    "serial": lambda: PipelinePlan.serial(["decode", "augment", "forward", "backward", "step"]),
    "pipelined": lambda: prefetch_plan(
        ["decode", "augment"], ["forward", "backward", "step"], carried=[("forward", "step")]
    ),
}
"""The plans that commands make for the image model."""

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs swpipe[plot]")


def run(*args: object) -> int:
    """Run the command line, and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    code = caught.value.code
    assert isinstance(code, int)
    return code


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Run a command, check that it is refused with exit code 2 in one line, and return the line."""
    assert run(*args) == 2
    told = capsys.readouterr().err.splitlines()
    progress = re.compile(r"\s*$|training|tuning|trying|(\S+: )?(recording|measuring) ")
    told = [line for line in told if not progress.match(line)]
    assert len(told) == 1
    assert told[0].startswith("swpipe: ")
    return told[0]


def out(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Return what a successful command prints."""
    assert run(*args) == 0
    return capsys.readouterr().out


# ------------------------------------------------------------------- train


def test_both_plans_train_bit_equal(capsys: pytest.CaptureFixture[str]) -> None:
    """Both plans train the image model, each on one thread."""
    torch.set_num_threads(2)
    try:
        printed = out(capsys, "train", "--steps", 12, "--compare", "serial,pipelined")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)
    assert "serial and pipelined: bit-equal: 12 losses\n" in printed


def test_a_plan_may_come_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A plan that ``swpipe plan show`` wrote can be used for training, and compared with itself."""
    file = tmp_path / "plan.toml"
    out(capsys, "plan", "show", "pipelined", "--output", file)
    assert PipelinePlan.load(file) == PLANS["pipelined"]()
    printed = out(capsys, "train", "--steps", 3, "--compare", f"serial,{file},serial")
    assert "plan.toml: bit-equal" in printed
    assert "serial and serial: bit-equal: 3 losses" in printed


def test_two_runs_print_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    """The model and the data come from separate generators with a fixed seed."""
    losses = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        name, steps, *rest = out(capsys, "train", "--steps", 7).splitlines()[2].split()
        assert (name, steps) == ("pipelined", "7")
        losses.append(rest[3:])
    assert losses[0] == losses[1]


def test_a_diverging_loss_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 1, and the line names the step."""

    @task
    def train(ctx: IterContext) -> None:
        ctx.loss = float(ctx.batch)

    module: Any = ModuleType("my_loop")
    module.loop = lambda: ([train], [1.0, math.nan, 1.0])
    monkeypatch.setitem(sys.modules, "my_loop", module)
    assert run("train", "--workload", "my_loop:loop") == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "the loss became NaN or infinite at step 1" in told


def test_a_list_of_batches_is_trained_on_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--steps`` is the number of steps, also if the list has fewer batches."""

    @task
    def train(ctx: IterContext) -> None:
        ctx.loss = ctx.batch

    module: Any = ModuleType("my_loop")
    module.loop = lambda: ([train], [1.0, 2.0, 3.0])
    monkeypatch.setitem(sys.modules, "my_loop", module)
    printed = out(capsys, "train", "--workload", "my_loop:loop", "--steps", 40)
    assert re.search(r"^serial +40 .* 1\.0000 to 1\.0000$", printed, re.MULTILINE)


def test_a_full_disk_loses_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed result stays, and the line names the missing file."""
    assert run("train", "--steps", 3, "--timeline", "/dev/full") == 2
    told = capsys.readouterr()
    assert "steps/s" in told.out
    assert told.err.splitlines()[-1] == "swpipe: /dev/full: No space left on device"


# ------------------------------------------------------- timeline


@needs_matplotlib
def test_a_timeline_is_recorded_and_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """``train --timeline`` writes JSON, ``trace`` makes a picture of it."""
    timeline = tmp_path / "new" / "timeline.json"
    assert run("train", "--steps", 6, "--timeline", timeline) == 0
    assert json.loads(timeline.read_text())
    assert run("trace", timeline) == 0
    assert timeline.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "initiation interval" in out
    assert run("trace", timeline, "--output", tmp_path / "other.svg") == 0
    assert "<svg" in (tmp_path / "other.svg").read_text()


def test_without_matplotlib_a_timeline_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing picture is an error only if it was asked for."""
    for module in ("app", "user_inputs"):
        monkeypatch.setattr(f"swpipe.cli.{module}.find_spec", lambda name: None)
    Trace([Span("read", 0, Row("thread", "io"), 0, 10**6)]).save(tmp_path / "one.json")
    assert "critical path" in out(capsys, "trace", tmp_path / "one.json")
    assert [*tmp_path.iterdir()] == [tmp_path / "one.json"]
    picture = ("--output", tmp_path / "one.png")
    assert "needs matplotlib" in refused(capsys, "trace", tmp_path / "one.json", *picture)


def test_a_plan_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """It shows which task works on which iteration, and the waits; no data is needed."""
    said = out(capsys, "plan", "show", "pipelined", "--periods", 4)
    assert "decode [io]          0   1   2   3" in said
    assert "forward [default]    .   0   1   2" in said
    assert "\nio: wait(loader.<pull>" in said


# ------------------------------------------------------------------ around the commands


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """It is printed to standard output, alone."""
    assert out(capsys, "--version") == f"swpipe {swpipe.__version__}\n"


def test_the_shell_completes_commands_and_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The help names the option that installs the script, which the shell reads when it starts."""
    assert "--install-completion" in out(capsys, "--help")
    monkeypatch.setenv("_SWPIPE_COMPLETE", "complete_bash")
    for words, number, completed in [
        ("swpipe plan si", 2, {"simulate"}),
        ("swpipe profile --ser", 2, {"--serially"}),
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
    """Yield the words of each command."""
    for group, names in COMMANDS.items():
        yield from ([*group.split(), name] for name in ["", *sorted(names - {"plan"})])


@pytest.mark.parametrize("words", list(every_command()), ids=" ".join)
def test_help_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """No sentence is cut off at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    said = out(capsys, *filter(None, words), "--help")
    lines = said.splitlines()[1:]  # the usage has dots of its own
    assert [line for line in lines if len(line) > 80 or line.endswith("...")] == []
    if words[-1] == "":
        found = re.findall(r"^  (\w+)  ", said.partition("Commands:")[2], re.MULTILINE)
        assert set(found) == COMMANDS[words[0]]


def test_a_terminal_that_knows_few_characters_is_given_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Names outside latin-1 once ended in a traceback."""
    PipelinePlan({"läd\u65e5": TaskSchedule()}).save(tmp_path / "plan.toml")
    out = TextIOWrapper(BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    assert run("plan", "show", tmp_path / "plan.toml") == 0
    out.seek(0)
    assert "läd?" in out.read()
