"""`swpipe doctor` examines a loop, or the machine alone, and says what it found."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli import refused, run
from tests.doctor.conftest import NAMES

LOOP = """
import swpipe, torch

@swpipe.task(pure=True)
def double(ctx):
    ctx.x = 2 * ctx.batch

@swpipe.task
def total(ctx):
    ctx.total = ctx.x.sum()

def loop():
    return [double, total], list(torch.ones(5, 3))
"""


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own is found."""
    monkeypatch.setattr("swpipe.doctor.examination.load_so_far", lambda **given: None)
    for name in [name for name in os.environ if name.startswith(NAMES)]:
        monkeypatch.delenv(name)


def test_a_loop_is_examined(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks are named, its plan's threads counted, and the headroom is measured."""
    (tmp_path / "doctored.py").write_text(LOOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "doctored", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run("doctor", "doctored:loop", "--plan", "serial", "--rounds", 2) == 0
    out = capsys.readouterr().out
    assert "double, total, on device cpu" in out
    assert "headroom: a step takes" in out


def test_without_a_loop_the_machine_is_examined(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is run."""
    assert run("doctor") == 0
    assert capsys.readouterr().out == "no findings: machine and settings, for device cpu\n"


def test_a_plan_needs_its_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """It says nothing without tasks."""
    assert "name the workload" in refused(capsys, "doctor", "--plan", "pipelined")
