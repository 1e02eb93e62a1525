"""On a device as late as can be nothing goes wrong where a run is broken off."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.device.virtual.harness import break_any
from tests.support.strategies import keeping_case, random_case


def broken_off(cases: Callable[[int], Any], seeds: Iterable[int]) -> dict[int, object]:
    """Return what went wrong, by seed, in runs that fail or are closed."""
    return {seed: wrong for seed in seeds if (wrong := break_any(cases(seed)))}


@pytest.mark.parametrize("cases", [random_case, keeping_case])
def test_failing_and_closing_break_no_rule_of_the_device(cases: Callable[[int], Any]) -> None:
    """What a broken-off run leaves on the device is ordered before whatever comes next.

    With seed 94 a task fails that has dropped what another stream still reads.
    """
    assert broken_off(cases, (*range(10), 94)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [random_case, keeping_case])
def test_failing_and_closing_break_no_rule_in_many_plans(cases: Callable[[int], Any]) -> None:
    """The same of more plans."""
    assert broken_off(cases, range(10, 40)) == {}
