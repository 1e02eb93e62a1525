"""Random loops that draw on either side have the plain loop's numbers, or are refused."""

from __future__ import annotations

import pytest

from tests.loops.random_loops import outcomes
from tests.support.budget import seeds

LOOPS = 150


@pytest.mark.examples
def test_a_random_loop_is_the_plain_loop_or_is_refused() -> None:
    """It is never silently different, for any draws of either side, and any end of the loop.

    Nine of ten are equal, so that not all are refused. Of those whose states show nothing, which
    the guide excludes, few differ.
    """
    numbers = [*seeds("loops", LOOPS)]
    counts, silent = outcomes(numbers)
    assert silent == []
    assert counts["equal"] >= 0.9 * len(numbers)
    assert counts["no trace"] <= 0.02 * len(numbers)
