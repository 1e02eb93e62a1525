"""Random plans give the serial run's numbers on any device; some do not without a guard."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("hypothesis")  # a GPU machine's own packages may lack it

from tests.device.kinds import Kind
from tests.device.virtual.guards import Guard
from tests.support.budget import seeds
from tests.support.device_work import SIMULATED
from tests.support.strategies import Case, hosted_case, keeping_case, random_case, worked_case

RANDOM = (random_case, keeping_case, worked_case, hosted_case)

QUICK = {
    random_case: range(20),
    keeping_case: range(20),
    worked_case: (*range(20), 43),
    hosted_case: (*range(20), 100),
}
"""Some of the seeds. 43 is the first in which workers share memory that waits; 100 is the first in
which a task of the host removes what a stream still reads."""

SEEDS_TO_TRY = 200
"""The number of random plans of which one must show the loss of a guard; ten mostly suffice."""


@pytest.mark.parametrize("cases", RANDOM)
def test_a_few_plans_break_no_rule_of_the_device_and_give_the_serial_numbers(
    kind: Kind, cases: Callable[[int], Case]
) -> None:
    """This is a small part of the next test: without one of the guards, some plans fail."""
    assert {seed: wrong for seed in QUICK[cases] if (wrong := kind.run(cases(seed)))} == {}


@pytest.mark.examples
@pytest.mark.slow
@pytest.mark.parametrize("cases", RANDOM)
def test_random_plans_break_no_rule_of_the_device_and_give_the_serial_numbers(
    kind: Kind, cases: Callable[[int], Case]
) -> None:
    """Outputs, states and draws are equal, also with early freeing and offloaded memory.

    Streams are late and events adversarial: no race, early wait, use after free, or running ahead.
    The seed of a failure says what to run again.
    """
    assert {
        seed: wrong for seed in seeds("plans", kind.plans) if (wrong := kind.run(cases(seed)))
    } == {}


@pytest.mark.skipif(not SIMULATED, reason="no CUDA device poisons what was freed")
def test_each_guard_stands_and_is_missed(
    kind: Kind, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same case fails without the guard, and passes with it.

    The virtual device detects what the guard prevents; on other devices a result is wrong.
    """

    def run(seed: int) -> object:
        return guard.run(seed) if kind.name == "virtual" else kind.run(guard.cases(seed))

    shows = guard.shows if kind.name == "virtual" else run
    with monkeypatch.context() as without:
        guard.remove(without)
        missed = next(filter(shows, range(SEEDS_TO_TRY)), None)
    assert missed is not None, "nothing goes wrong without the guard"
    seeds = [missed] if guard.cases in RANDOM else [missed, *range(20)]
    assert {seed: wrong for seed in seeds if (wrong := run(seed))} == {}
