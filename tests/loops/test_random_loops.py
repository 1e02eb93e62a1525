"""Random loops that draw on either side have the numbers of the plain loop, or are refused."""

from __future__ import annotations

import pytest

from tests.loops.random_loops import FACTOR, KINDS, outcomes

LOOPS = 150 * FACTOR


@pytest.mark.parametrize("part", range(3))
def test_a_random_loop_is_the_plain_loop_or_is_refused(part: int) -> None:
    """Never silently another: whatever is drawn, whenever, by whichever side, wherever it is left.

    And not because all is refused: nine of ten are equal.
    """
    seeds = range(part * LOOPS // 3, (part + 1) * LOOPS // 3)
    counts, silent = outcomes(seeds)
    assert silent == []
    assert counts["equal"] >= 0.9 * len(seeds)
    assert len(KINDS) == 9
