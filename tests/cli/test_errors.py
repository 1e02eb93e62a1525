"""Mistakes at the command line: reported in one line, with exit code 2, before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swpipe.cli import launched
from swpipe.core.costs import CostModel, TaskCost
from tests.cli.test_cli import PLANS, needs_matplotlib, refused, run
from tests.cli.test_plan_commands import here
from tests.support.hostile import MOST_IN_ONE_LINE
from tests.support.scripts import Script, Scripts

__all__ = ["here"]  # the fixture

RANKS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

OWN = ("--workload", "my_loop:loop")
COSTS = ("plan", "simulate", "plan.toml", "--costs")

LINES = [
    # values
    (("train", "--steps", 2**70), "'--steps': "),
    (("train", "--steps", "0"), "Usage: swpipe"),
    (("train", "--frobnicate"), "Usage: swpipe"),
    (("plan",), "Usage: swpipe"),
    (("sing",), "Usage: swpipe"),
    (("train", "--device", "meta"), "--device meta: device 'meta' is not on this machine"),
    (("train", "--device", "abacus"), "--device abacus: "),
    (("plan", "infer", "--device", "cuda:99"), "--device cuda:99: "),
    (("train", "--device", "\x1b[31m"), "--device '\\x1b[31m': "),
    (("plan", "show", "\x1b[31m\n"), "plan '\\x1b[31m\\n': "),
    (("plan", "show", "pipelined", "--periods", 10**9), "'--periods': "),
    (("plan", "simulate", "plan.toml", "--picture", "out.exe"), "pictures are .png, .svg, .pdf"),
    # one thing or the other
    (("train", "--plan", "serial", "--compare", "a,b"), "--plan and --compare are both given"),
    (("trace",), "Missing argument 'TIMELINE.json'"),
    (("report", "--plan", "pipelined"), "--plan and --json are about a loop, and none is named"),
    (("plan", "auto", "--costs", "costs.json"), "--costs is given without a plan"),
    (("plan", "auto", "plan.toml"), "plan plan.toml is given without the costs of its tasks"),
    # workloads
    (("train", "--workload", "gone"), "name images, or module:function, such as my_loop:loop"),
    (("plan", "infer", "--workload", "\x1b:f"), "workload '\\x1b:f': "),
    (("plan", "infer", "--workload", ":"), "name images, or module:function"),
    (("profile", "--workload", "my_loop.py:loop"), "No module named 'my_loop.py'"),
    (("plan", "infer", "--workload", "my_loop:gone"), "no function 'gone'"),
    (("report", "my_loop:gone"), "no function 'gone'"),
    (("plan", "infer", "--workload", "not_there:loop"), "not_there"),
    (("plan", "infer", "--workload", "my_loop:nothing"), "return (tasks, batches)"),
    (("plan", "infer", "--workload", "my_loop:strange"), "@swpipe.task makes one"),
    (("plan", "infer", "--workload", "my_loop:mistyped"), "give a subclass of TypedContext"),
    (("profile", "--workload", "my_loop:short"), "my_loop:short: batches is empty"),
    (("plan", "infer", "--workload", "my_loop:short"), "it has 0 batches, and 1 are needed"),
    # plans and costs
    (("train", "--compare", "sideways"), "plan sideways: No such file"),
    (("plan", "show", "sideways"), "serial, pipelined"),
    (("report", "my_loop:loop", "--plan", "none.toml"), "plan none.toml"),
    (("plan", "auto", "gone.toml", "--costs", "costs.json"), "gone.toml"),
    (("train", "--plan", "bad.toml"), "line 2, column 9"),
    (("plan", "show", "bad.json"), "line 2 column 15"),
    (("plan", "show", "odd.toml"), "unknown key 'dept'"),
    (("plan", "show", "odd.toml"), "schedule.read.stage is 'one'"),
    (("plan", "show", "cycle.toml"), "cycle.toml"),
    (("plan", "check", "other.toml", *OWN), "'lode'"),
    (("plan", "auto", "plan.toml", "--costs", "costs.json", "--frozen", "gone"), "'gone'"),
    ((*COSTS, "gone.json"), "gone.json"),
    ((*COSTS, "costs.json", "--measured", "gone.json"), "gone.json"),
    ((*COSTS, "few.json"), "task 'learn' has no cost"),
    (("plan", "auto", "plan.toml", "--costs", "few.json"), "task 'learn' has no cost"),
    ((*COSTS, "bad.json"), "bad.json: "),
    # timelines
    (("trace", "\x1b[31m.json"), "\\x1b[31m.json"),
    (("trace", "empty.json"), "empty.json: "),
    (("trace", "costs.json"), "costs.json: "),
    (("trace", "endless.json"), "inf is no time in microseconds"),
    # outputs
    (("report", "my_loop:loop", "-o", "my_loop.py/my.html"), "my.html"),
]

ENDLESS = {
    "traceEvents": [
        {"name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "io"}},
        {"cat": "task", "pid": 1, "tid": 1, "ts": float("inf"), "dur": 1, "name": "a"}
        | {"args": {"iteration": 0, "wait_us": 0}},
    ],
    "otherData": {"producer": "swpipe", "arrows": []},
}
FILES = {
    "bad.toml": "pipeline_depth = 3\ndeps = [}\n",
    "bad.json": '{\n  "schedule": }\n',
    "odd.toml": "dept = 3\n[schedule.read]\nstage = 'one'\n",
    "cycle.toml": 'deps = [["a", "b"], ["b", "a"]]\n[schedule.a]\n[schedule.b]\n',
    "other.toml": "[schedule.lode]",
    "few.json": CostModel({"load": TaskCost()}).to_json(),
    "empty.json": "",
    "endless.json": json.dumps(ENDLESS),
}


def checked(line: str, said: str) -> None:
    """Check that a line has these words, and that a terminal can show it."""
    assert said in line
    assert len(line) <= MOST_IN_ONE_LINE
    assert line.isprintable()


def test_a_mistake_is_told_in_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row has a command and words of the line; many once ended in a traceback."""
    for name, text in FILES.items():
        (here / name).write_text(text)
    for args, said in LINES:
        assert run(*args) == 2, args
        told = capsys.readouterr()
        checked(told.err.splitlines()[-1], said)
        assert told.out == "", args


def test_a_plan_of_other_tasks_is_refused_in_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the missing and the unknown tasks."""
    text = PLANS["pipelined"]().to_toml().replace('"decode"', '"decoed"')
    (here / "decoed.toml").write_text(text.replace("[schedule.decode]", "[schedule.decoed]"))
    checked(refused(capsys, "train", "--plan", "decoed.toml"), "'decoed'")
    checked(refused(capsys, "profile", "--plan", "decoed.toml"), "'decode'")


# --------------------------------------------------------------------------- hostile files

UNKNOWN = [["a", f"x{k}"] for k in range(5000)]
HOSTILE_PLANS = {
    "deep.json": ('{"schedule": ' + "[" * 10**5, "recursion depth"),
    "deep.toml": ("order = " + "[" * 10**5, "recursion depth"),
    "inline.toml": ("order = " + "{a = " * 10**5, "recursion depth"),
    "digits.json": ('{"pipeline_depth": ' + "1" * 5000 + "}", "4300 digits"),
    "digits.toml": ("pipeline_depth = " + "1" * 5000, "4300 digits"),
    "surrogate.json": ('{"schedule": {"\\ud800": {}}}', "task name '\\ud800'"),
    "empty.toml": ('[schedule.""]', "task name ''"),
    "own.toml": ('[schedule."<admit>"]', "task name '<admit>'"),
    "escape.toml": ('[schedule."\\u001B[31m"]', "task name '\\x1b[31m'"),
    "line.toml": ('[schedule."a\\nb"]', "task name 'a\\nb'"),
    "group.toml": ('[schedule.a]\nthread_group = "\\u0007"', "thread_group '\\x07'"),
    "distance.toml": ('cross_iter_deps = [["a", "a", 1000000000]]\n[schedule.a]', "1 to 1000"),
    "stage.toml": ("[schedule.a]\nstage = 1000000000", "from 0 to 999"),
    "depth.toml": ("pipeline_depth = 1000000000\n[schedule.a]", "at most 1000"),
    "latin.toml": ("[schedule.gr\udcfc\udcdfe]", "utf-8"),
    "names.json": (
        json.dumps({"schedule": {"a": {}, "b": {}}, "deps": UNKNOWN}),
        "'x0', which the schedule does not have (it has: a, b)",
    ),
}
HOSTILE_COSTS = {
    "none": ("[]", "costs is []: it must be a table"),
    "negative": ('{"tasks": {"load": {"host_us": -1}, "learn": {}}}', "host_us is -1"),
    "huge": ('{"tasks": {"load": {"host_us": 1.7e308}}}', "host_us is 1.7e+308"),
    "infinite": ('{"tasks": {"load": {"host_us": Infinity}}}', "host_us is inf"),
    "nan": ('{"tasks": {"load": {"host_us": NaN}}}', "host_us is nan"),
    "long": ('{"tasks": {"load": {"host_us": 1' + "0" * 400 + "}}}", "an integer of 1329 bits"),
    "digits": ('{"handover_us": ' + "1" * 5000 + "}", "4300 digits"),
    "deep": ('{"tasks": ' * 10**5, "recursion depth"),
    "name": ('{"tasks": {"\\u001b[31m": {}}}', "task '\\x1b[31m'"),
    "surrogate": ('{"tasks": {"a": {"resources": ["\\ud800"]}}}', "'\\ud800'"),
}


@pytest.mark.parametrize("name", [*HOSTILE_PLANS, *HOSTILE_COSTS])
def test_a_file_that_is_no_plan_or_cost_model_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], here: Path, name: str
) -> None:
    """Each once ended in a traceback, a hang, a message of megabytes, or infinite predictions."""
    command = ("plan", "show") if name in HOSTILE_PLANS else COSTS
    text, said = {**HOSTILE_PLANS, **HOSTILE_COSTS}[name]
    (here / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    line = refused(capsys, *command, name)
    checked(line, said)
    assert name in line


# ------------------------------------------------------------------------------------- ranks


@pytest.fixture
def as_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables of torchrun, as a container of a cluster may have them."""
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_do_not_come_are_told_and_not_waited_for(scripts: Scripts, rank: str) -> None:
    """This holds for the rank with the store and for ranks that search for it."""
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
def test_a_variable_that_torchrun_would_not_set_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names it; some once ended in a traceback."""
    for name, values in {
        "RANK": ("x", "2", "-1", "\x1b[31m"),
        "WORLD_SIZE": ("0", "1" * 5000),
        "MASTER_PORT": ("65536",),
        "LOCAL_RANK": ("one",),
    }.items():
        for value in values:
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                line = refused(capsys, "train")
            assert line.startswith(f"swpipe: {name}=")
            checked(line, "torchrun sets an integer from")


@pytest.mark.usefixtures("as_a_rank")
def test_what_needs_no_ranks_waits_for_none(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Help once waited forever, silently, for ranks that nobody had started.

    Under torchrun all other commands join: one line tells all ranks of a command that is wrong.
    """
    assert not launched.joins(["plan", "show", "plan.toml"])
    for args in ((), ("--help",), ("train", "--help"), ("plan", "show", "plan.toml")):
        assert run(*args) == 0
    assert not launched.joins(["demo"])
    assert launched.joins(["profile"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    assert launched.joins(["demo"])
    assert not launched.joins(["demo", "--help"])
    assert not launched.joins(["--version"])


# ----------------------------------------------------------------------------------- outputs


@needs_matplotlib
def test_a_file_that_cannot_be_written_is_refused_first(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """Once it was found after the training, and the result was lost in a traceback."""
    (here / "file").touch()
    for args in (
        ("train", "--timeline"),
        ("profile", "--output"),
        ("plan", "show", "plan.toml", "--output"),
        ("plan", "infer", "--output"),
        ("plan", "simulate", "plan.toml", "--keep-costs"),
        ("plan", "simulate", "plan.toml", "--picture"),
        ("plan", "auto", "--keep-costs"),
        ("plan", "auto", "--output"),
        ("demo", "--directory"),
    ):
        checked(refused(capsys, *args, here / "file" / "out.png"), str(here / "file"))
    (here / "folder.toml").mkdir()
    assert run("plan", "show", "plan.toml", "--output", "folder.toml") == 2
    told = capsys.readouterr()
    checked(told.err.removesuffix("\n"), "folder.toml: ")
    assert told.out == ""


def test_where_one_file_fails_the_others_are_written(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """The costs are written after a full disk prevented the plan."""
    args = ("plan", "auto", "plan.toml", "--costs", "costs.json", "--keep-costs", "/dev/full")
    line = refused(capsys, *args, "--output", "new/best.toml")
    assert line == "swpipe: /dev/full: No space left on device"
    assert (here / "new" / "best.toml").stat().st_size > 0


SHOW = "from swpipe.cli import main; main(['plan', 'show', 'pipelined'])"
FULL = f"import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); {SHOW}"
CLOSED = f"import os, sys; r, w = os.pipe(); os.close(r); sys.stdout = open(w, 'w'); {SHOW}"


def test_a_standard_output_that_takes_nothing(scripts: Scripts) -> None:
    """A full output is an error of one line; a reader may stop reading, as ``| head`` does."""
    full, closed = scripts.run_together([Script(FULL), Script(CLOSED)])
    assert full.returncode == 2
    assert full.stderr == "swpipe: standard output: No space left on device\n"
    assert (closed.returncode, closed.stderr) == (1, "")
