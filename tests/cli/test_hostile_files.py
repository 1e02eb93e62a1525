"""Files that no plan, cost model or timeline can be: one short line, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swpipe import PipelinePlan, TaskSchedule
from tests.cli.test_cli import refused
from tests.support.hostile import MOST_IN_ONE_LINE

UNKNOWN = [["a", f"x{k}"] for k in range(5000)]
PLANS = {
    "deep.json": ('{"schedule": ' + "[" * 10**5, "nested too deeply"),
    "deep.toml": ("order = " + "[" * 10**5, "nested too deeply"),
    "inline.toml": ("order = " + "{a = " * 10**5, "nested too deeply"),
    "dotted.toml": (".".join("a" * 40_000) + " = 1", "more than 100 dots"),
    "digits.json": ('{"pipeline_depth": ' + "1" * 5000 + "}", "4300 digits"),
    "digits.toml": ("pipeline_depth = " + "1" * 5000, "4300 digits"),
    "hexadecimal.toml": ("pipeline_depth = 0x" + "f" * 5000, "200 digits"),
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
COSTS = {
    "huge": ('{"tasks": {"load": {"host_us": 1.7e308}}}', "host_us is 1.7e+308"),
    "infinite": ('{"tasks": {"load": {"host_us": Infinity}}}', "host_us is inf"),
    "nan": ('{"tasks": {"load": {"host_us": NaN}}}', "host_us is nan"),
    "long": ('{"tasks": {"load": {"host_us": 1' + "0" * 400 + "}}}", "an integer of 1329 bits"),
    "digits": ('{"handover_us": ' + "1" * 5000 + "}", "4300 digits"),
    "deep": ('{"tasks": ' * 10**5, "nested too deeply"),
    "name": ('{"tasks": {"\\u001b[31m": {}}}', "task '\\x1b[31m'"),
    "surrogate": ('{"tasks": {"a": {"resources": ["\\ud800"]}}}', "'\\ud800'"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_file_that_is_no_plan_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """Each of them once ended in a traceback, a hang, or a message of megabytes."""
    text, said = PLANS[name]
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    line = refused(capsys, "plan", "show", tmp_path / name)
    assert said in line
    assert len(line) <= MOST_IN_ONE_LINE
    assert line.isprintable()


@pytest.mark.parametrize("name", COSTS)
def test_a_file_that_is_no_cost_model_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """Each of them once ended in a traceback, or in infinite predictions."""
    text, said = COSTS[name]
    (tmp_path / "costs.json").write_text(text)
    PipelinePlan({"load": TaskSchedule()}).save(tmp_path / "plan.toml")
    plan, costs = tmp_path / "plan.toml", tmp_path / "costs.json"
    line = refused(capsys, "plan", "simulate", plan, "--costs", costs)
    assert said in line
    assert len(line) <= MOST_IN_ONE_LINE
    assert line.isprintable()


def test_a_timeline_that_never_ends_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An infinite time once ended in a traceback."""
    row = {"name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "io"}}
    task = {"cat": "task", "pid": 1, "tid": 1, "ts": float("inf"), "dur": 1, "name": "a"}
    task["args"] = {"iteration": 0, "wait_us": 0}
    document = {"traceEvents": [row, task], "otherData": {"producer": "swpipe", "arrows": []}}
    (tmp_path / "timeline.json").write_text(json.dumps(document))
    line = refused(capsys, "trace", tmp_path / "timeline.json")
    assert "inf is no time in microseconds" in line
