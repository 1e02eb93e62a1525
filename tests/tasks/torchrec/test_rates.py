"""When a learning rate takes effect: as in TorchRec's class of the same name.

Rates change in the loop, between two calls of ``progress``; in the classes that look the next batch
up ahead, or before ``zero_grad``, the tables' rates are those of an earlier call.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from torch import nn

from swpipe.tasks.torchrec.table_state import rates_of, set_rates
from tests.support.ranks import Ranks
from tests.tasks.torchrec.rates import (
    JOB,
    KINDS,
    SCHEDULES,
    WHERE,
    differences,
    looked_up_with,
)

LATE = {
    "prefetch": [0] * 7,
    "fused": [1] * 7,
    "fused, late": [0] * 7,
    "semi-sync from 4": [1] * 5 + [2] * 2,
    "semi-sync from 900": [1] * 7,
}
"""How many calls of ``progress`` after it was set a rate is looked up with, by batch."""


def _all_looked_up() -> dict[str, list[float]]:
    """The rates in each class where they are not TorchRec's, or not by the rule."""
    found = {}
    for kind, late in LATE.items():
        calls = [batch - calls for batch, calls in enumerate(late)]
        wanted = [JOB.options["lr"] if call < 0 else 1.0 + call for call in calls]
        seen = looked_up_with(kind, 7, on_ours=True)[:7]
        theirs = looked_up_with(kind, 7, on_ours=False)[:7]
        if not seen == theirs == wanted:
            found[kind] = seen
    return found


def test_a_rate_takes_effect_when_the_guide_says(one_rank: Ranks) -> None:
    """In TorchRec's class as in ours; the first look-ups have the rate that tables begin with."""
    assert one_rank.run(_all_looked_up) == [{}]


def _different(cases: list[tuple[str, str, str]], steps: int) -> list[Any]:
    return [(case, where) for case in cases if (where := differences(*case, steps))]


OTHERWISE_ALONE = ("fused", "fused, late", "semi-sync from 4", "semi-sync, less memory")
"""Classes that have one backward where there is one rank."""


def test_trainings_equal_torchrecs_under_schedules(one_rank: Ranks, two_ranks: Ranks) -> None:
    """Losses, outputs, parameters, states: every class, with schedules and places in turn."""
    rates = [*product(SCHEDULES, WHERE)]
    cases = [(kind, *rates[k % len(rates)]) for k, kind in enumerate(KINDS)]
    assert two_ranks.run(_different, cases, 8, deadline_s=300.0) == [[], []]
    cases = [(kind, *rates[-k]) for k, kind in enumerate(OTHERWISE_ALONE)]
    assert one_rank.run(_different, cases, 8) == [[]]


class Tables(nn.Module):
    """Two groups of tables that hold a rate."""

    def __init__(self, rates: list[float]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(map(Group, rates))


class Group(nn.Module):
    """As fbgemm's."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def get_learning_rate(self) -> float:
        """The rate of the next look-up."""
        return self.rate

    def set_learning_rate(self, rate: float) -> None:
        """Set it."""
        self.rate = rate


def test_rates_of_another_sharding_are_refused() -> None:
    """A rank with more groups of tables would train some with the rate they were made with."""
    saved, other = Tables([0.5, 0.25]), Tables([0.1, 0.1])
    set_rates([other], rates_of([saved]))
    assert rates_of([other]) == [0.5, 0.25]
    with pytest.raises(ValueError, match="has 2 learning rates of tables, and this rank has 4"):
        set_rates([other, saved], rates_of([saved]))
