"""When a learning rate takes effect: as in TorchRec's class of the same name.

Rates change in the loop, between two calls of ``progress``; in the classes that look the next batch
up ahead, or before ``zero_grad``, the tables' rates are those of an earlier call.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from swpipe.tasks.torchrec.table_state import rates_of, set_rates
from tests.support.pairs import pairwise_cases
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import everything
from tests.tasks.torchrec.rates import (
    JOB,
    KINDS,
    SCHEDULES,
    WHERE,
    Training,
    differences,
    looked_up_with,
)
from tests.tasks.torchrec.trial import Outcome

LATE = {
    "fused": [1] * 9,
    "semi-sync from 0": [1, *[2] * 8],
    "semi-sync from 4": [1] * 5 + [2] * 4,
    "semi-sync, stashed": [1] * 5 + [2] * 4,
    "semi-sync from 900": [1] * 9,
    "fused, less memory": [1] * 9,
    "semi-sync, less memory": [1] * 5 + [2] * 4,
}
"""How many calls of ``progress`` after it was set a rate is looked up with, by batch."""


def _by_rule(kind: str) -> list[float]:
    made_with = JOB.options["lr"]
    calls = [batch - late for batch, late in enumerate(LATE.get(kind, [0] * 9))]
    return [made_with if call < 0 else 1.0 + call for call in calls]


def _all_looked_up() -> dict[str, list[float]]:
    """The rates in each class where they are not TorchRec's, or not by the rule."""
    found = {}
    for kind in KINDS:
        seen = looked_up_with(kind, 9, on_ours=True)[:9]
        theirs = looked_up_with(kind, 9, on_ours=False)[:9]
        if not seen == theirs == _by_rule(kind):
            found[kind] = seen
    return found


def test_a_rate_takes_effect_when_the_guide_says(one_rank: Ranks) -> None:
    """In TorchRec's class as in ours; the first look-ups have the rate that tables begin with."""
    assert one_rank.run(_all_looked_up) == [{}]


def _different(cases: list[tuple[str, str, str]], steps: int) -> list[Any]:
    return [(case, where) for case in cases if (where := differences(*case, steps))]


def test_trainings_equal_torchrecs_under_schedules(one_rank: Ranks, two_ranks: Ranks) -> None:
    """Losses, outputs, parameters, states: pairs of class, schedule, place and number of ranks."""
    every = pairwise_cases(KINDS, SCHEDULES, WHERE, (1, 2))
    for ranks, group in ((1, one_rank), (2, two_ranks)):
        cases = [case[:3] for case in every if case[3] == ranks]
        assert group.run(_different, cases, 8, deadline_s=300.0) == [[]] * ranks


def _resumed(kind: str) -> list[str]:
    """Where a training that is drained, stopped and resumed differs from one that goes on."""
    whole, second = Training(kind), Training(kind)
    whole.run(0, 6)
    done = 6 + len(whole.pipeline.drain())
    second.take_over(whole, done)
    left = [Outcome(one.run(done, 14), everything(one.model)) for one in (whole, second)]
    return left[0].differences(left[1])


@pytest.mark.parametrize("kind", ["fused", "semi-sync from 4", "semi-sync from 900"])
def test_a_state_has_the_rates_that_were_handed_over(one_rank: Ranks, kind: str) -> None:
    """The next look-up takes that of an earlier step, which no optimizer's state has."""
    assert one_rank.run(_resumed, kind) == [[]]


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
