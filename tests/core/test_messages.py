"""Values and lists in messages are short, and on one line."""

from __future__ import annotations

from typing import Any

import pytest

from swpipe.core.messages import MOST_CHARACTERS, listed, plain, shorten, shown
from swpipe.errors import MOST_IN_MESSAGE, PlanError, Problem

DEEP: list[Any] = []
for _ in range(10_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, 2**100_000, -(2**100_000), [2**100_000], DEEP, {"a": [[0] * 10**5]}, "\n\x1b"],
    ids=["text", "number", "negative", "inside", "deep", "wide", "controls"],
)
def test_any_value_is_shown_in_short_on_one_line(value: object) -> None:
    """Values may be long or deep, have numbers that Python refuses to print, or escape codes."""
    assert len(shown(value)) <= MOST_CHARACTERS
    assert shown(value).isprintable()
    assert shown(("it's", -1.5, None)) == repr(("it's", -1.5, None))


def test_a_long_text_loses_its_middle() -> None:
    """Its ends stay."""
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 9) == "abc...ijk"


def test_of_many_names_the_first_are_listed() -> None:
    """The text has the number of further names."""
    assert listed([]) == "none"
    assert listed(["a", "b"]) == "a, b"
    assert listed([f"t{k}" for k in range(100)]).endswith(", t10, t11 and 88 more")


def test_a_name_is_quoted_only_where_it_is_strange() -> None:
    """A strange name is not printable, too long, or empty."""
    assert plain("h2d") == "h2d"
    assert [plain(name) for name in ("", "a\n", 3)] == ["''", "'a\\n'", "3"]
    assert len(plain("x" * 10**5)) <= MOST_CHARACTERS


def test_a_plan_error_tells_as_many_problems_as_fit() -> None:
    """All are kept; the message and its line say how many more there are."""
    error = PlanError([Problem(f"problem {n}: {'x' * 90}") for n in range(1000)])
    assert len(error.problems) == 1000
    assert "1000 problems" in str(error)
    for text in (str(error), error.in_one_line):
        assert "problem 0: " in text
        assert "problem 57: " in text
        assert "and 942 more" in text
        assert len(text) < 2 * MOST_IN_MESSAGE


def test_one_long_problem_is_told_in_short() -> None:
    """Even the first problem has a limit, and is on one line."""
    error = PlanError([Problem("y" + "x\n" * 10**5)])
    assert error.in_one_line.startswith("yx x x")
    assert error.in_one_line.isprintable()
    assert len(error.in_one_line) < MOST_IN_MESSAGE
