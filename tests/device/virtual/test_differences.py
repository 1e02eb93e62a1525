"""``first_difference`` finds the races of an engine that lacks a guard, and none in the engine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest

from swpipe.testing import Difference
from tests.device.virtual.differences import difference_on
from tests.device.virtual.guards import (
    GUARDS,
    early_end,
    run_drained,
    run_far_ahead,
    run_keeping,
    run_on_one_stream,
    run_two_readers,
    run_worked,
)
from tests.device.virtual.test_spans import ORDERS
from tests.support.exploring import ExploringHost
from tests.support.strategies import random_case

SEEDS_TO_TRY = 120


def on_random_case(seed: int, *, batches_launched: bool = False) -> object:
    return difference_on(random_case(seed), batches_launched=batches_launched)


NUMBERS: dict[str, Callable[[int], object]] = {
    "host waits": on_random_case,
    "event waits": on_random_case,
    "event wait for a batch on the device": partial(on_random_case, batches_launched=True),
    "sink waits at retirement": on_random_case,
    "hold on deleted and overwritten attributes": on_random_case,
    "hold at retirement": on_random_case,
    "record before publish": on_random_case,
    "streams begin after the caller's": on_random_case,
    "one order of submission per stream": on_random_case,
    "lanes wait to the last period of a run": lambda seed: difference_on(
        early_end(seed), ExploringHost(seed)
    ),
}
"""The guards without which numbers are wrong, with the case of a seed in which they are."""

_KEEPS = (run_keeping, run_two_readers, run_on_one_stream, run_far_ahead, run_drained)
OF_OTHER_PLANS = tuple(guard.name for guard in GUARDS if guard.run in (*_KEEPS, run_worked))
"""The guards of what a plan does not keep, and of workers, which no plan of the cases here has."""

RULES = ("as many events as iterations can ask for", "what a broken run left is joined")
"""The guards of which only the device's own rules tell (``test_guards``).

Without the first an event is recorded again while others may still wait for its last record: this
device, like CUDA, lets them wait for the record that was there when they asked, so that no number
changes, and a record later than the one that was meant keeps the order, too. Without the second
the work of a broken run may still be under way when the next one begins; of a run that failed there
are no numbers to compare, and its spans belong to no iteration that ended.
"""


def test_no_plan_gives_other_numbers() -> None:
    """Random plans on late streams, compared task by task with the serial run."""
    for case in {*NUMBERS.values()}:
        assert [case(seed) for seed in range(12)] == [None] * 12


# A device without the guard may fail in close(), too.
@pytest.mark.filterwarnings("ignore:a pipeline with iterations in flight was dropped")
@pytest.mark.parametrize("name", NUMBERS)
def test_a_missing_guard_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the task, the iteration and the attribute that differ first."""
    next(guard for guard in GUARDS if guard.name == name).remove(monkeypatch)
    differences = map(NUMBERS[name], range(SEEDS_TO_TRY))
    found = next(one for one in differences if isinstance(one, Difference))
    assert found.task in ("<retire>", "decode", "ids", "forward") or found.task.startswith("t")
    assert found.attribute.startswith("ctx.")
    gc.collect()  # here, where the warnings of what was dropped are ignored


def test_each_guard_shows_in_one_way() -> None:
    """In numbers, in the order of calls and work, or by the rules of the device."""
    assert sorted((*NUMBERS, *ORDERS, *RULES, *OF_OTHER_PLANS)) == sorted(
        guard.name for guard in GUARDS
    )
