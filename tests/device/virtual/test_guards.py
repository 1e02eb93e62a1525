"""On a device as late as can be nothing goes wrong where a run is broken off, or a value goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.device.virtual.guards import drained, early_end, far_ahead, on_one_stream, two_readers
from tests.device.virtual.harness import Finding, break_any, run_any
from tests.support.strategies import keeping_case, random_case


def found(run: Callable[[Any], Finding], cases: Callable[[int], Any], count: int) -> dict[int, Any]:
    """What was wrong, by seed."""
    wrong = ((seed, run(cases(seed))) for seed in range(count))
    return {seed: finding for seed, finding in wrong if finding}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [random_case, keeping_case])
def test_failing_and_closing_break_no_rule_of_the_device(cases: Callable[[int], Any]) -> None:
    """What a broken-off run leaves on the device is ordered before whatever comes next."""
    assert found(break_any, cases, 80) == {}


@pytest.mark.parametrize("cases", [early_end, two_readers, on_one_stream, far_ahead, drained])
def test_the_cases_of_guards_that_random_plans_do_not_miss(cases: Callable[[int], Any]) -> None:
    """A lane that is through is still waited for; and what goes is waited for or held."""
    assert found(run_any, cases, 50) == {}
