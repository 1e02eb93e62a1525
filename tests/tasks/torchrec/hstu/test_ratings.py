"""Ratings from files and generated ones, and the workload at the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swpipe.tasks.torchrec.hstu import Event, RatingsError, generate_ratings, read_ratings
from tests.cli.test_cli import refused, run


def test_a_file_becomes_histories(tmp_path: Path) -> None:
    """Of each user the newest events, in order of time; items lie in the table."""
    path = tmp_path / "u.data"
    path.write_text("7\t3\t4.5\t30\n8 103 1 5\n\n7 4 5 10\n7 5 0.5 20\n")
    assert read_ratings([path], items=100, longest=2) == [
        [Event(5, 1, 20), Event(3, 9, 30)],
        [Event(3, 2, 5)],
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1 2 3\n", "line 1: it has 3 fields: a line is user item rating timestamp"),
        ("1 2 3 4\n1 x 3 4\n", "line 2: 'x 3 4' is not item rating timestamp"),
        ("1 2 7 4\n", "line 1: the rating is 7: ratings are 0.5 to 5 stars"),
        ("1 2 nan 4\n", "line 1: the rating is nan"),
        ("\n", "there is no rating"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """With the line and what is wrong with it."""
    path = tmp_path / "ratings"
    path.write_text(text)
    with pytest.raises(RatingsError, match=re.escape(told)):
        read_ratings([path], 100, 5)


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(RatingsError, match="nowhere: No such file"):
        read_ratings([tmp_path / "nowhere"], 100, 5)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RatingsError, match="binary: it is not a text file"):
        read_ratings([tmp_path / "binary"], 100, 5)


def test_generated_ratings_depend_on_the_seed_alone() -> None:
    """Histories of varying lengths, in order of time, with ratings in half stars."""
    histories = generate_ratings(50, 30, 6, seed=1)
    assert histories == generate_ratings(50, 30, 6, seed=1)
    assert histories != generate_ratings(50, 30, 6, seed=2)
    assert {len(h) for h in histories} == {1, 2, 3, 4, 5, 6}
    for history in histories:
        assert sorted(history, key=lambda event: event.time) == history
        assert all(1 <= e.action <= 10 and 0 <= e.item < 30 for e in history)


def test_the_command_line_trains_on_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Under each plan the same numbers; without --steps once through the data."""
    path = tmp_path / "ratings"
    lines = [f"{n % 9} {n} {1 + n % 5} {n}\n" for n in range(60)]
    path.write_text("".join(lines))
    args = ("--workload", "hstu", "--ratings", path, "--sequences", 4)
    assert run("train", *args, "--compare", "serial,default,by_stream") == 0
    out = capsys.readouterr().out
    assert "serial and default: bit-equal: 3 losses" in out
    assert "serial and by_stream: bit-equal: 3 losses" in out
    assert "data: 9 rows, none malformed" in out


def test_the_command_line_refuses_a_wrong_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In one line."""
    path = tmp_path / "ratings"
    path.write_text("1 2 9 4\n")
    told = refused(capsys, "train", "--workload", "hstu", "--ratings", path)
    assert "line 1: the rating is 9" in told
