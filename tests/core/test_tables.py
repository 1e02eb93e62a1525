"""Tables are plain text."""

from __future__ import annotations

from swpipe.core.tables import table

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
