"""Random endings on one rank, two and four, compared with the plain loop."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests._distributed.endings import drawn, faults, run
from tests.support.budget import seeds
from tests.support.ranks import RankDied, Ranks

EXAMPLES = {1: 20, 2: 20, 4: 8}


@pytest.fixture(scope="module", name="groups")
def groups_of_this_module() -> Iterator[dict[int, Ranks]]:
    """Ranks of this module's own, since in many endings some of them end."""
    with Ranks(1) as one, Ranks(2) as two, Ranks(4) as four:
        yield {1: one, 2: two, 4: four}


@pytest.mark.parametrize("size", EXAMPLES)
def test_no_rank_ends_well_with_a_wrong_number(groups: dict[int, Ranks], size: int) -> None:
    """Each output is the plain loop's; all batches are trained on where the plain loop does so."""
    found = {}
    for seed in seeds("endings", EXAMPLES[size]):
        ending = drawn(seed, size)
        with tempfile.TemporaryDirectory() as folder:
            with suppress(RankDied):  # a script that lets an error out ends
                groups[size].run(run, ending, folder)
            if wrong := faults(ending, folder):
                found[seed] = wrong, ending
    assert not found
