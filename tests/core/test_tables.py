"""Tables are plain text in files and pipes, and drawn on a terminal."""

from __future__ import annotations

import pytest

from swpipe.cli.user_errors import echo, exit_code
from swpipe.core.tables import IN_BOXES, table

ROWS = [("read", "1.250", ""), ("forward [bold]", "12.500", "8.000")]
TITLES = ("task", "ms", "exposed ms")


def test_numbers_end_on_the_right() -> None:
    """Names begin on the left; each cell is as it was given."""
    assert table(TITLES, ROWS).splitlines() == [
        "task                ms    exposed ms",
        "--------------  ------  ------------",
        "read             1.250",
        "forward [bold]  12.500         8.000",
    ]
    assert table(TITLES, ROWS, left=(0, 1)).splitlines()[2] == "read            1.250"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    """No wider than it is, without codes of its own; nothing else does."""
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert exit_code(lambda: echo(table(TITLES, ROWS))) == 0
    assert IN_BOXES.get() is False
    drawn = capsys.readouterr().out
    assert drawn.startswith("╭") is is_terminal
    assert max(map(len, drawn.splitlines())) == (30 if is_terminal else 36)
    assert "[bold]" in drawn
    assert "\x1b" not in drawn
