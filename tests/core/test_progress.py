"""Progress is one line on a terminal, and lines in a file."""

from __future__ import annotations

import os
import pty
import re
import sys
import termios

import pytest

from swpipe.core import progress
from swpipe.core.progress import progress_bar


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file each step is a line."""
    monkeypatch.setattr(progress, "EVERY_S", 0.0)


def count_to(total: int | None, **given: object) -> None:
    """A bar that counts to three."""
    with progress_bar("training", " steps", total, **given) as bar:
        for _ in range(3):
            bar.update()


def test_in_a_file_it_is_lines(capfd: pytest.CaptureFixture[str]) -> None:
    """What is going on, how far it has come, no bar and no carriage return; each state once."""
    count_to(3)
    said = capfd.readouterr().err
    lines = said.splitlines()
    assert lines[0] == "training"
    assert [re.match(r"training: +\d+% (\d)/3 \[", line)[1] for line in lines[1:]] == [*"123"]
    assert "\r" not in said
    assert "█" not in said
    count_to(None)
    assert capfd.readouterr().err.splitlines()[-1].startswith("training: 3 steps [")


def test_what_is_quick_or_not_asked_for_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """With a delay, or with ``shown=False``."""
    count_to(3, delay=60.0)
    count_to(3, shown=False)
    assert capfd.readouterr().err == ""


def test_the_last_state_is_a_line_whenever_it_came(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the next line was not due yet; not where it is not to stay."""
    monkeypatch.setattr(progress, "EVERY_S", 60.0)
    count_to(3)
    assert " 3/3 [" in capfd.readouterr().err.splitlines()[-1]
    count_to(3, leave=False)
    assert capfd.readouterr().err.splitlines() == ["training"]


def test_a_new_description_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Each step of long work is named when it begins."""
    with progress_bar("tuning", " iterations") as bar:
        bar.set_description("measuring")
        bar.total = 2
        bar.refresh()
        bar.update()
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == ["tuning", "measuring"]
    assert lines[2].startswith("measuring:  50% 1/2 [")


def test_on_a_terminal_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written over, and stands in a line of its own at the end."""
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    with os.fdopen(end, "w", encoding="utf-8") as stderr, os.fdopen(terminal, "rb") as screen:
        monkeypatch.setattr(sys, "stderr", stderr)
        count_to(3)
        stderr.flush()
        shown = ""
        while "\n" not in shown:  # a terminal hands out what is there
            shown += screen.read1(4096).decode()
    assert "\rtraining: 100%" in shown
    assert shown.count("\n") == 1
