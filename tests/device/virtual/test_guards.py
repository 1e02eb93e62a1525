"""On a device as late as can be nothing goes wrong; with any guard taken away, something does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.device.virtual.guards import (
    GUARDS,
    Guard,
    break_keeping,
    break_random,
    run_drained,
    run_early_end,
    run_far_ahead,
    run_keeping,
    run_on_one_stream,
    run_random,
    run_two_readers,
)
from tests.device.virtual.harness import Finding

PLANS = 240
"""How many random plans run in one go; seeded, so that a failure names what to run again."""

SEEDS_TO_TRY = 200
"""Among how many random plans the loss of a guard must show; most show within ten."""


def complain(seed: int, finding: Finding) -> None:
    """Fail with all that was found."""
    found = [*finding.violations, *([finding.error] if finding.error else [])]
    raise BaseExceptionGroup(f"seed {seed}", found)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_random, run_keeping])
def test_random_plans_break_no_rule_of_the_device_and_give_the_serial_numbers(
    run: Callable[[int], Finding],
) -> None:
    """Late streams, adversarial events: no race, early wait, use after free, or running ahead.

    Also where values go early, have second names, or are saved outside of the context for later.
    """
    for seed in range(PLANS):
        if finding := run(seed):
            complain(seed, finding)


@pytest.mark.slow
def test_failing_and_closing_break_no_rule_of_the_device() -> None:
    """What a broken-off run leaves on the device is ordered before whatever comes next."""
    for seed in range(PLANS // 3):
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


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_each_guard_is_missed(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the device finds what it was to prevent."""
    guard.remove(monkeypatch)
    assert any(guard.run(seed).shows(guard.found) for seed in range(SEEDS_TO_TRY))
