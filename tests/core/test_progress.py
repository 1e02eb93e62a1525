"""Progress is one line on a terminal, and a few states in a file."""

from __future__ import annotations

import os
import pty
import sys
import termios

import pytest

from swpipe.core import progress
from swpipe.core.progress import progress_bar


def count_to(total: int | None, **given: object) -> None:
    """Show a bar that counts to three."""
    with progress_bar("training", " steps", total, **given) as bar:
        for _ in range(3):
            bar.update()


def test_a_file_has_no_bar_and_few_states(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the first and the last, and one every ten seconds."""
    count_to(3)
    states = capfd.readouterr().err.rstrip().split("\r")
    assert [state.partition(" [")[0].split() for state in states if state] == [
        ["training:", "0%", "0/3"],
        ["training:", "100%", "3/3"],
    ]
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    count_to(None)
    assert "training: 2 steps [" in capfd.readouterr().err


def test_what_is_not_asked_for_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """With ``shown=False`` nothing is printed."""
    count_to(3, shown=False)
    assert capfd.readouterr().err == ""


def test_on_a_terminal_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is overwritten, and is complete at the end."""
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    with os.fdopen(end, "w", encoding="utf-8") as stderr, os.fdopen(terminal, "rb") as screen:
        monkeypatch.setattr(sys, "stderr", stderr)
        count_to(3)
        stderr.flush()
        shown = ""
        while "\n" not in shown:  # a terminal returns what it has
            shown += screen.read1(4096).decode()
    assert "\rtraining: 100%" in shown
    assert shown.count("\n") == 1
