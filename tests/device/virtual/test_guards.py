"""On a device as late as can be nothing goes wrong where a run is broken off, or a value goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.device.virtual.guards import (
    break_keeping,
    break_random,
    run_drained,
    run_early_end,
    run_far_ahead,
    run_on_one_stream,
    run_two_readers,
)
from tests.device.virtual.harness import Finding

BROKEN = 80


def complain(seed: int, finding: Finding) -> None:
    """Fail with all that was found."""
    found = [*finding.violations, *([finding.error] if finding.error else [])]
    raise BaseExceptionGroup(f"seed {seed}", found)


@pytest.mark.slow
def test_failing_and_closing_break_no_rule_of_the_device() -> None:
    """What a broken-off run leaves on the device is ordered before whatever comes next."""
    for seed in range(BROKEN):
        for finding in (break_random(seed), break_keeping(seed)):
            if finding:
                complain(seed, finding)


def test_a_lane_that_is_through_is_still_waited_for() -> None:
    """Its wait stands for another one, which was left out: it goes on to the end of the run."""
    assert not any(run_early_end(seed) for seed in range(50))


@pytest.mark.parametrize("run", [run_two_readers, run_on_one_stream, run_far_ahead, run_drained])
def test_what_goes_is_waited_for_or_held(run: Callable[[int], Finding]) -> None:
    """By all who read it, also where the run ends."""
    assert not any(run(seed) for seed in range(50))
