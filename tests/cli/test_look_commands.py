"""`swpipe diff` and `report`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from swpipe.profiler import ProfileResults
from swpipe.profiler.other_load import OtherLoad
from tests.cli.test_cli import out, refused, run
from tests.cli.test_plan_commands import here
from tests.profiler.results import measured, of_step
from tests.profiler.test_result import OTHER, RESULT
from tests.support.bare import bare_environment
from tests.support.virtual_clock import TimedHost, tell_time

__all__ = ["here"]  # the fixture


def test_a_regression_beyond_the_interval_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One batch of several suffices; a difference within the interval, or a gain, does not."""
    before, after, within = (tmp_path / f"{name}.json" for name in ("before", "after", "within"))
    ProfileResults([RESULT, OTHER]).save(before)
    ProfileResults([RESULT, of_step(OTHER, 0.03)]).save(after)
    assert run("diff", before, after) == 1
    assert "saved ms" in capsys.readouterr().out
    assert run("diff", after, before) == 0
    RESULT.save(before)  # one result is as good
    of_step(RESULT, 0.0127).save(within)
    assert run("diff", before, within) == 0
    ProfileResults.of([RESULT, OTHER], RESULT).save(before)  # with the result of the loop
    assert run("diff", before, before) == 0


def test_a_busy_machine_is_told_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the file that was measured on it."""
    RESULT.save(tmp_path / "before.json")
    measured(RESULT, other_load=OtherLoad(1.5, 2)).save(tmp_path / "after.json")
    assert run("diff", tmp_path / "before.json", tmp_path / "after.json") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "after.json: the machine is busy: other processes use 1.5 of 2 cores" in first


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an error of one line with exit code 2: it is no regression."""
    RESULT.save(tmp_path / "before.json")
    OTHER.save(tmp_path / "after.json")
    (tmp_path / "odd.json").write_text('{"batch": 3}')
    (tmp_path / "three.json").write_text("3")
    files = tmp_path / "before.json", tmp_path / "after.json"
    assert "diff: the profiles are of different batches" in refused(capsys, "diff", *files)
    for name in ("odd.json", "three.json", "gone.json"):
        assert name in refused(capsys, "diff", tmp_path / "before.json", tmp_path / name)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the load and the environment of this machine."""
    monkeypatch.setattr("swpipe.profiler.rounds.load_so_far", lambda **given: None)
    bare_environment(monkeypatch)


@pytest.mark.usefixtures("idle")
def test_a_report_on_ones_own_loop(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is JSON or a page at the user's path; ``tests/docs`` checks the text."""
    host = TimedHost()
    tell_time(monkeypatch, host)
    monkeypatch.setattr(time, "sleep", host.sleep)
    page = here / "out" / "my.html"
    args = ("my_loop:slowly_loaded", "-o", page, "--rounds", 2, "--json")
    data = json.loads(out(capsys, "report", *args))
    assert data["version"] == 1
    whole_s = sum(part["seconds"] for part in data["parts"])
    assert whole_s == pytest.approx(data["step"]["value_s"], rel=1e-2)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.usefixtures("idle")
def test_without_a_loop_the_settings_of_the_machine_are_examined(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loop runs; each finding has its fix."""
    assert out(capsys, "report") == "no findings: the machine and its settings\n"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "[blocking-setting]\n  fix: unset it" in out(capsys, "report")
