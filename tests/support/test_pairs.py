"""The chooser of pairs."""

from __future__ import annotations

from itertools import product

from tests.support.pairs import pairs_of, pairwise_cases


def test_every_pair_of_values_occurs() -> None:
    """In far fewer cases than there are combinations, of two parameters in all of them."""
    parameters = ("abcd", range(3), (False, True), ("x", "y", "z", "w"))
    chosen = pairwise_cases(*parameters)
    wanted = {pair for case in product(*parameters) for pair in pairs_of(case)}
    assert {pair for case in chosen for pair in pairs_of(case)} == wanted
    assert len(chosen) <= 20 < 96
    assert sorted(pairwise_cases("ab", "cd")) == sorted(product("ab", "cd"))


def test_cases_that_are_not_allowed_are_left_out() -> None:
    """The pairs that only they have too."""

    def differ(case: tuple[str, ...]) -> bool:
        return case[0] != case[1]

    chosen = pairwise_cases("ab", "ab", "xy", allowed=differ)
    assert all(map(differ, chosen))
    wanted = {p for c in product("ab", "ab", "xy") if differ(c) for p in pairs_of(c)}
    assert {pair for case in chosen for pair in pairs_of(case)} == wanted
