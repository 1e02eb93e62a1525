"""`swpipe diff`, `report` and `doctor`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from swpipe.profiler import ProfileResults
from swpipe.profiler.other_load import OtherLoad
from tests.cli.test_cli import out, refused, run
from tests.cli.test_plan_commands import here
from tests.doctor.conftest import NAMES
from tests.profiler.test_result import OTHER, RESULT

__all__ = ["here"]  # the fixture


@pytest.mark.parametrize(
    ("after_s", "code", "says"),
    [
        (0.0135, 1, "8.0% ± 2.8% longer"),
        (0.0127, 0, "no difference of iterations beyond ± 2.8%"),
        (0.0090, 0, "28.0% ± 2.8% shorter"),
    ],
)
def test_a_regression_beyond_the_interval_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after_s: float, code: int, says: str
) -> None:
    """A difference within it does not; nor does a gain."""
    ProfileResults([RESULT]).save(tmp_path / "before.json")
    replace(RESULT, baseline_s=after_s).save(tmp_path / "after.json")  # one result is as good
    assert run("diff", tmp_path / "before.json", tmp_path / "after.json") == code
    out = capsys.readouterr().out
    assert f"batch 0: iterations are {says}" in out or f"batch 0: {says}" in out
    assert "saved ms" in out


def test_one_batch_of_several_that_is_slower_counts(tmp_path: Path) -> None:
    """Each batch has its own table."""
    ProfileResults([RESULT, OTHER]).save(tmp_path / "before.json")
    slower = replace(OTHER, baseline_s=0.03)
    ProfileResults([RESULT, slower]).save(tmp_path / "after.json")
    assert run("diff", tmp_path / "before.json", tmp_path / "after.json") == 1
    assert run("diff", tmp_path / "after.json", tmp_path / "before.json") == 0


def test_a_busy_machine_is_told_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the file that was measured on it."""
    RESULT.save(tmp_path / "before.json")
    replace(RESULT, other_load=OtherLoad(1.5, 2)).save(tmp_path / "after.json")
    assert run("diff", tmp_path / "before.json", tmp_path / "after.json") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "after.json: the machine is busy: other processes use 1.5 of 2 cores" in first


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, and with 2: it is no regression."""
    RESULT.save(tmp_path / "before.json")
    OTHER.save(tmp_path / "after.json")
    (tmp_path / "odd.json").write_text('{"batch": 3}')
    files = tmp_path / "before.json", tmp_path / "after.json"
    assert "diff: the profiles are of different batches" in refused(capsys, "diff", *files)
    for name in ("odd.json", "gone.json"):
        assert name in refused(capsys, "diff", tmp_path / "before.json", tmp_path / name)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own is found."""
    for module in ("doctor.examination", "profiler.rounds"):
        monkeypatch.setattr(f"swpipe.{module}.load_so_far", lambda **given: None)
    for name in [name for name in os.environ if name.startswith(NAMES)]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("idle")
def test_a_report_on_ones_own_loop(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON, and the page is where the user wants it; ``tests/docs`` looks at the text."""
    page = here / "out" / "my.html"
    args = ("my_loop:slowly_loaded", "-o", page, "--rounds", 2, "--json")
    data = json.loads(out(capsys, "report", *args))
    assert data["version"] == 1
    assert sum(one["ms"] for one in data["parts"]) == pytest.approx(data["step"]["ms"], rel=1e-2)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.usefixtures("idle", "here")
def test_a_loop_is_examined(capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON, where the headroom is measured; or the machine alone."""
    args = ("my_loop:loop", "--plan", "serial", "--rounds", 2, "--json")
    assert json.loads(out(capsys, "doctor", *args))["headroom"]["step_ms"] > 0
    assert out(capsys, "doctor") == "no findings: machine and settings, for device cpu\n"
