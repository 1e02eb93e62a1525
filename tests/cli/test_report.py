"""`swpipe report`: the lines that it prints, the page that it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_cli import refused, run

LOOP = """
import time
from swpipe import task

def loop():
    @task(pure=True)
    def read(ctx):
        time.sleep(0.002)
        ctx.x = ctx.batch

    @task
    def train(ctx):
        time.sleep(0.001)

    return [read, train], range(20)
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory has a module with a loop."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reported_loop.py").write_text(LOOP)


def test_a_report_on_ones_own_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verdict, ceiling and next step are printed; the page is where the user wants it."""
    page = tmp_path / "out" / "my.html"
    assert run("report", "reported_loop:loop", "-o", page, "--rounds", "2", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert "-bound" in printed or "balanced" in printed
    assert "ceiling: any overlap can save" in printed
    assert "next step: " in printed
    assert f"written to {page}" in printed
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_cannot_be_reported_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The loop, the plan and the file, each before anything is measured."""
    assert "no function 'other'" in refused(capsys, "report", "reported_loop:other")
    loop = ("report", "reported_loop:loop")
    assert "plan none.toml" in refused(capsys, *loop, "--plan", "none.toml")
    assert "my.html" in refused(capsys, *loop, "-o", "reported_loop.py/my.html")
    assert "report" in refused(capsys, "report")
