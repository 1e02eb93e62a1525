"""Random loops that draw on either side have the plain loop's numbers, or are refused."""

from __future__ import annotations

import pytest

from tests.loops.random_loops import outcomes
from tests.support.budget import seeds

LOOPS = 150


@pytest.mark.examples
def test_a_random_loop_is_the_plain_loop_or_is_refused() -> None:
    """Never silently another: whatever is drawn, whenever, by whichever side, wherever it is left.

    And not because all is refused: nine of ten are equal. Of those whose states show nothing, by
    the guide's word, few differ.
    """
    numbers = [*seeds("loops", LOOPS)]
    counts, silent = outcomes(numbers)
    assert silent == []
    assert counts["equal"] >= 0.9 * len(numbers)
    assert counts["no trace"] <= 0.02 * len(numbers)
