"""Every pair of values instead of every combination: most faults need no more than two values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any, TypeAlias

Case: TypeAlias = tuple[Any, ...]
Pair: TypeAlias = tuple[tuple[int, Hashable], tuple[int, Hashable]]


def pairs_of(case: Case) -> set[Pair]:
    """Return the pairs of values in a case, each value with the number of its parameter."""
    return set(combinations(enumerate(case), 2))


def pairwise_cases(
    *parameters: Iterable[Any], allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Return cases that contain each pair of values of two parameters, if an allowed case has it.

    The choice is greedy and deterministic: the next case has the most missing pairs.
    """
    whole: Sequence[Case] = [case for case in product(*parameters) if allowed(case)]
    missing = {pair for case in whole for pair in pairs_of(case)}
    chosen: list[Case] = []
    while missing:
        chosen.append(max(whole, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen
