"""A ring of time: what is taken, and where there is room."""

from __future__ import annotations

import pytest

from swpipe.plans.reservation import Ring


def ring(*taken: tuple[float, float], slack_us: float = 0.0) -> Ring:
    """A ring of 100 us with operations (start, time) on it."""
    made = Ring(100.0, slack_us)
    for task, (start, time) in enumerate(taken):
        made.put(task, start, time)
    return made


@pytest.mark.parametrize(
    ("start", "time", "later"),
    [
        (0, 10, 0),  # ends before
        (5, 10, 25),  # runs into it
        (10, 5, 20),  # begins together with it
        (20, 5, 10),  # begins inside
        (30, 80, 0),  # all the rest of the ring, to its begin in the next period
        (30, 81, 100),  # one more than there is
        (130, 5, 0),  # a period later is the same
        (10, 0, 0),  # no time at its begin
        (15, 0, 15),  # no time inside
        (30, 0, 0),  # no time at its end
    ],
)
def test_how_much_later_is_clear(start: float, time: float, later: float) -> None:
    """The first clear start after an operation from 10 to 30 on a ring of 100."""
    assert ring((10, 20)).later_us(start, time) == pytest.approx(later)


def test_an_operation_over_the_end_of_the_period_is_in_the_way_at_its_begin() -> None:
    """From 90 to 110 is from 90 to 100, and from 0 to 10."""
    assert ring((90, 20)).later_us(5, 10) == pytest.approx(5)
    assert ring((90, 20)).clashing(95, 3) == {0}
    assert ring((90, 20)).clashing(10, 80) == set()


def test_how_much_sooner_is_clear() -> None:
    """The last clear start before an operation."""
    assert ring((10, 20)).sooner_us(25, 5) == pytest.approx(20)
    assert ring((10, 20)).sooner_us(30, 5) == 0


def test_a_gap_that_cannot_be_spared_is_closed() -> None:
    """Between 30 and 80, a start at 40 moves to where it leaves one gap instead of two."""
    assert ring((10, 20), (80, 10)).snug_us(40, 10) == pytest.approx(30)
    assert ring((10, 20), (80, 10)).snug_us(30, 10) == 0
    assert ring((10, 20), (80, 10), slack_us=10).snug_us(40, 10) == 0
    assert ring().snug_us(40, 10) == 0
