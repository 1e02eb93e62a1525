"""The command line, from the outside: what it prints, writes and answers."""

from __future__ import annotations

import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import swpipe
from swpipe import PipelinePlan
from swpipe.cli import app, main
from swpipe.cli.launched import joins
from swpipe.cli.options import spread_lists
from swpipe.plans.clicks import PLANS
from swpipe.tasks.clicks.clicks_workload import cache_home
from tests.tasks.clicks.rows import lines, row, varied_row, write_log

needs_clicks = pytest.mark.skipif(
    find_spec("torchrec") is None or find_spec("polars") is None,
    reason="needs swpipe[clicks] and TorchRec",
)
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs swpipe[plot]")
SAMPLE = Path(__file__).parents[3] / "shared" / "data" / "criteo_sample.tsv"


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
    """Run what must be refused: exit code 2 and one line, which is returned."""
    assert run(*args) == 2
    told = capsys.readouterr().err.splitlines()
    told = [line for line in told if line.strip() and not line.startswith("training:")]
    assert len(told) == 1
    assert told[0].startswith("swpipe: ")
    return told[0]


# ------------------------------------------------------------------- train


@needs_clicks
def test_both_plans_train_bit_equal(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    """``--compare`` trains under each plan and says so."""
    assert run("train", "--data", log, "--batch-size", 8, "--compare", "serial,pipelined") == 0
    out = capsys.readouterr().out
    assert "serial and pipelined: bit-equal: 8 losses and 37 parameters" in out
    assert "data: 60 rows, none malformed" in out


@needs_clicks
def test_training_computes_on_one_thread(log: Path) -> None:
    """Reading has a thread of its own: more within an operation would fight with it."""
    torch.set_num_threads(2)
    try:
        assert run("train", "--data", log, "--batch-size", 30) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


@needs_clicks
@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample of real rows is not here")
def test_real_rows_train_bit_equal(capsys: pytest.CaptureFixture[str]) -> None:
    """200 rows of a real log."""
    assert run("train", "--data", SAMPLE, "--batch-size", 16, "--compare", "serial,pipelined") == 0
    out = capsys.readouterr().out
    assert "bit-equal: 13 losses and 37 parameters" in out
    assert "data: 200 rows, none malformed" in out


@needs_clicks
def test_several_logs_follow_each_other(
    capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path
) -> None:
    """``--data`` takes several paths, ``--held-out`` too."""
    more = write_log(tmp_path / "more.tsv", 25, seed=1)
    args = ("--data", log, more, "--held-out", more, "--batch-size", 20, "--plan", "serial")
    assert run("train", *args) == 0
    out = capsys.readouterr().out
    assert "data: 85 rows" in out
    assert "held-out rows: AUC " in out
    assert "25 rows" in out


@needs_clicks
def test_steps_may_go_through_the_data_again(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    """Sixty rows in batches of 20, seven steps."""
    args = ("train", "--data", log, "--batch-size", 20, "--steps", 7, "--plan", "serial")
    assert run(*args) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:2] == ["serial", "7"]


@needs_clicks
def test_a_plan_may_come_from_a_file(
    capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path
) -> None:
    """What ``swpipe plan show`` wrote can be trained under, and compared with."""
    file = tmp_path / "plan.toml"
    assert run("plan", "show", "pipelined", "--output", file) == 0
    assert PipelinePlan.load(file) == PLANS["pipelined"]()
    args = ("train", "--data", log, "--batch-size", 20, "--compare", f"serial,{file}")
    assert run(*args) == 0
    assert "plan.toml: bit-equal" in capsys.readouterr().out


@needs_clicks
def test_the_seed_decides_the_losses(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    """The same seed prints the same loss, another one another."""
    told = []
    for seed in (3, 3, 4):
        args = ("train", "--data", log, "--batch-size", 20, "--plan", "serial", "--seed", seed)
        assert run(*args) == 0
        told.append(capsys.readouterr().out.splitlines()[2].split()[5:])
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
    """Counted, and named with file and line; training goes on without them."""
    path = tmp_path / "odd.tsv"
    draw = random.Random(0)
    path.write_bytes(lines(varied_row(draw), row({0: "7"}), varied_row(draw), "x"))
    assert run("train", "--data", path, "--batch-size", 2) == 0
    out = capsys.readouterr().out
    assert "data: 4 rows, 2 of them malformed and dropped:" in out
    assert f"{path}:2: label 7 is not 0 or 1" in out
    assert f"{path}:4: 1 fields; a row has 40" in out


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


# ------------------------------------------------------- timeline and profile


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


@pytest.mark.slow
@needs_clicks
@pytest.mark.parametrize("mode", ["--serially", None])
def test_a_breakdown_is_printed_and_written(
    capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path, mode: str | None
) -> None:
    """Every task has its line, under the plan or in the plain loop."""
    file = tmp_path / "profile.json"
    args = ("profile", "--data", log, "--batch-size", 10, "--rounds", 2, "--output", file)
    assert run(*args, *([mode] if mode else [])) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in PLANS["pipelined"]().schedule)
    (result,) = json.loads(file.read_text())
    assert result["mode"] == ("serial" if mode else "pipelined")


@pytest.mark.slow
@needs_clicks
def test_batches_are_profiled_side_by_side(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    """A column for each."""
    args = ("profile", "--data", log, "--batch-size", 10, "--rounds", 2, "--batches", 2)
    assert run(*args, "--serially") == 0
    out = capsys.readouterr().out
    assert "batch 0" in out
    assert "batch 1" in out


@pytest.mark.slow
@needs_clicks
@needs_matplotlib
def test_the_demo_shows_everything(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparison, breakdown, timeline, and a summary of where the files are."""
    from swpipe.tasks.clicks import generate

    monkeypatch.setattr(generate, "TRAIN_ROWS", 800)
    monkeypatch.setattr(generate, "HELD_OUT_ROWS", 100)
    monkeypatch.setattr(app, "ROUNDS", 2)
    assert run("demo", "--directory", tmp_path, "--steps", 80, "--batch-size", 32) == 0
    out = capsys.readouterr().out
    assert "serial and pipelined: bit-equal: 80 losses and 37 parameters" in out
    assert "pipelined over serial: no difference was measured: one turn has no range" in out
    assert "held-out rows: AUC" in out
    files = [Path(line.strip()) for line in out.split("files:\n")[1].splitlines()]
    assert [file.name for file in files] == [
        "timeline.json",
        "breakdown-serial.json",
        "breakdown-pipelined.json",
        "timeline.png",
        "breakdown.png",
    ]
    assert all(file.stat().st_size > 0 for file in files)


def test_a_plan_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Who works on which iteration when, and who waits for whom; no data is needed."""
    assert run("plan", "show", "pipelined", "--periods", 4) == 0
    out = capsys.readouterr().out
    assert "read [io]            0   1   2   3" in out
    assert "forward [default]    .   0   1   2" in out
    assert "depth 3" in out
    assert "\nio: wait(default.<admit>" in out


# --------------------------------------------------------------- bad input


@needs_clicks
def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By name."""
    assert "gone.tsv: no such file" in refused(capsys, "train", "--data", tmp_path / "gone.tsv")


@needs_clicks
def test_an_empty_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By name."""
    (tmp_path / "empty.tsv").touch()
    assert "empty.tsv: the file is empty" in refused(
        capsys, "train", "--data", tmp_path / "empty.tsv"
    )


@needs_clicks
@pytest.mark.parametrize("plan", ["serial", "pipelined"])
def test_strict_ends_at_the_first_malformed_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, plan: str
) -> None:
    """With its file and line, from whichever thread."""
    path = tmp_path / "odd.tsv"
    path.write_bytes(lines(row(), row({4: "x"}), "x"))
    told = refused(capsys, "train", "--data", path, "--strict", "--plan", plan)
    assert "odd.tsv:2: I4 x is not an integer" in told


@pytest.mark.parametrize("command", [("train", "--plan"), ("profile", "--plan"), ("plan", "show")])
def test_a_plan_that_does_not_parse_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    """With line and column, TOML and JSON alike, and before any data is looked at."""
    (tmp_path / "bad.toml").write_text("pipeline_depth = 3\ndeps = [}\n")
    told = refused(capsys, *command, tmp_path / "bad.toml")
    assert "bad.toml" in told
    assert "line 2, column 9" in told
    (tmp_path / "bad.json").write_text('{\n  "schedule": }\n')
    assert "line 2 column 15" in refused(capsys, *command, tmp_path / "bad.json")


@pytest.mark.parametrize("command", [("train", "--compare"), ("plan", "show")])
def test_a_plan_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    """With the names that would have done."""
    told = refused(capsys, *command, "sideways")
    assert "plan sideways: No such file" in told
    assert "serial, pipelined" in told


@needs_clicks
def test_a_job_without_its_libraries_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what is missing, and what to install."""
    for name in [*sys.modules]:
        if f"{name}.".startswith("swpipe.tasks.clicks.") and not name.endswith("_workload"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "polars", None)
    told = refused(capsys, "train")
    assert "the click job needs polars: pip install 'swpipe[clicks]' torchrec" in told


def test_one_plan_or_several_but_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    """``--plan`` beside ``--compare`` would leave open what is meant."""
    told = refused(capsys, "train", "--plan", "serial", "--compare", "serial,pipelined")
    assert "--plan and --compare: give one of them" in told


def test_a_file_that_is_no_plan_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It parses, but says something else; all that is wrong stands in one line."""
    (tmp_path / "odd.toml").write_text("dept = 3\n[schedule.read]\nstage = 'one'\n")
    told = refused(capsys, "plan", "show", tmp_path / "odd.toml")
    assert "unknown key 'dept'" in told
    assert "schedule.read.stage is 'one'" in told


@needs_clicks
@pytest.mark.parametrize("command", ["train", "profile"])
def test_an_unknown_task_in_a_plan_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, log: Path, command: str
) -> None:
    """As is the task that the plan forgot."""
    text = PLANS["pipelined"]().to_toml().replace('"read"', '"reed"')
    path = tmp_path / "plan.toml"
    path.write_text(text.replace("[schedule.read]", "[schedule.reed]"))
    told = refused(capsys, command, "--data", log, "--plan", path)
    assert "plan.toml" in told
    assert "'reed'" in told
    assert "'read'" in told


def test_a_plan_that_cannot_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also when it is only to be shown."""
    path = tmp_path / "plan.toml"
    path.write_text('deps = [["a", "b"], ["b", "a"]]\n[schedule.a]\n[schedule.b]\n')
    assert "plan.toml" in refused(capsys, "plan", "show", path)


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], device: str
) -> None:
    """By name."""
    assert f"--device {device}: " in refused(capsys, "train", "--device", device)


@pytest.mark.parametrize("content", [None, "", "{}", '{"traceEvents": 3}'])
def test_what_is_no_timeline_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None
) -> None:
    """A missing file, an empty one, and JSON of another kind."""
    path = tmp_path / "timeline.json"
    if content is not None:
        path.write_text(content)
    assert "timeline.json: " in refused(capsys, "trace", path)


@pytest.mark.parametrize(
    "args",
    [
        ("train", "--steps", "0"),
        ("train", "--batch-size", "-1"),
        ("train", "--frobnicate"),
        ("plan",),
        ("sing",),
    ],
)
def test_options_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...]
) -> None:
    """With how to use the command."""
    assert run(*args) == 2
    assert "Usage: swpipe" in capsys.readouterr().err


def test_the_version_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under torchrun, where nobody has to be waited for."""
    assert run("--version") == 0
    assert capsys.readouterr().out == f"swpipe {swpipe.__version__}\n"
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    assert not joins(["--version"])


@pytest.mark.parametrize(
    ("words", "number", "completed"),
    [
        ("swpipe tr", 1, {"train", "trace"}),
        ("swpipe plan si", 2, {"simulate"}),
        ("swpipe trace --work", 2, {"--workload"}),
        ("swpipe profile --batch", 2, {"--batches", "--batch-size"}),
    ],
)
def test_the_shell_completes_commands_and_options(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    number: int,
    completed: set[str],
) -> None:
    """Those of workloads too, which are declared when the command line starts."""
    monkeypatch.setenv("_SWPIPE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(number))
    assert run() == 0
    assert set(capsys.readouterr().out.split()) == completed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_is_a_script(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    """Which the shell reads when it starts; the help names the option that installs it."""
    assert run("--help") == 0
    assert "--install-completion" in capsys.readouterr().out
    monkeypatch.setenv("_SWPIPE_COMPLETE", f"source_{shell}")
    assert run() == 0
    assert f"complete_{shell}" in capsys.readouterr().out


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """And each of them explains itself."""
    assert run("--help") == 0
    out = capsys.readouterr().out
    for command in ("train", "profile", "plan", "trace", "demo"):
        assert command in out
        assert run(command, "--help") == 0


@pytest.mark.parametrize(
    ("args", "spread"),
    [
        (["--data", "a", "b", "--steps", "3"], ["--data", "a", "--data", "b", "--steps", "3"]),
        (["--data", "a", "--data", "b"], ["--data", "a", "--data", "b"]),
        (["--held-out", "a", "b"], ["--held-out", "a", "--held-out", "b"]),
        (["--plan", "x", "y"], ["--plan", "x", "y"]),
        (["--data=a", "b"], ["--data=a", "b"]),
        (["--data"], ["--data"]),
    ],
)
def test_options_that_take_a_list_are_spread(args: list[str], spread: list[str]) -> None:
    """The parser wants the option before each value; people do not."""
    assert spread_lists(args) == spread


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
