"""G1 on an accelerator: every plan gives the serial run's bits, whatever the streams' timing."""

from __future__ import annotations

from functools import cache

import pytest
from torch import Tensor

from tests.device.accelerator.training import PLANS, batches, same, trained
from tests.device.accelerator.work import warm_up

ITERATIONS = 25


@cache
def serially() -> list[Tensor]:
    """What the serial run comes to."""
    return trained(None, 100, batches(ITERATIONS))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_to_the_same_bits(name: str, seed: int) -> None:
    """Means of losses, parameters and the optimizer's state are the serial run's, with dropout."""
    warm_up()
    assert same(serially(), trained(PLANS[name], seed, batches(ITERATIONS)))
