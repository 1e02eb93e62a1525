"""Random plans give the serial run's numbers on any device; without a guard some of them do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("hypothesis")  # a GPU machine's own packages may lack it

from tests.device.kinds import Kind
from tests.device.virtual.guards import Guard
from tests.support.budget import seeds
from tests.support.device_work import SIMULATED
from tests.support.strategies import Case, keeping_case, random_case, worked_case

RANDOM = (random_case, keeping_case, worked_case)

SEEDS_TO_TRY = 200
"""Among how many random plans the loss of a guard must show; most show within ten."""


@pytest.mark.examples
@pytest.mark.slow
@pytest.mark.parametrize("cases", RANDOM)
def test_random_plans_break_no_rule_of_the_device_and_give_the_serial_numbers(
    kind: Kind, cases: Callable[[int], Case]
) -> None:
    """Outputs, states and draws; also where values go early, or are saved outside of the context.

    Streams are late and events adversarial: no race, early wait, use after free, or running ahead.
    Seeded, so that a failure names what to run again.
    """
    assert {
        seed: wrong for seed in seeds("plans", kind.plans) if (wrong := kind.run(cases(seed)))
    } == {}


@pytest.mark.skipif(not SIMULATED, reason="no CUDA device poisons what was freed")
def test_each_guard_is_missed(kind: Kind, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the virtual device finds what it was to prevent; on others something is wrong.

    With it nothing is, in the cases that are there for the guard.
    """
    if guard.cases not in RANDOM:
        assert {seed: wrong for seed in range(20) if (wrong := kind.run(guard.cases(seed)))} == {}
    guard.remove(monkeypatch)
    if kind.name == "virtual":
        assert any(map(guard.shows, range(SEEDS_TO_TRY)))
    else:
        assert any(kind.run(guard.cases(seed)) for seed in range(SEEDS_TO_TRY))
