"""G1 on an accelerator: every plan gives the serial run's bits, whatever the streams' timing."""

from __future__ import annotations

import gc
import random
from functools import cache

import pytest
from torch import Tensor

from swpipe import PipelinePlan
from swpipe.testing import Difference, Loop, first_difference
from tests.device.accelerator.training import PLANS, Training, badly, batches, same, trained
from tests.device.accelerator.work import DEVICE, warm_up
from tests.device.virtual.guards import GUARDS

ITERATIONS = 12


@cache
def serially() -> list[Tensor]:
    """Return the results of the serial run."""
    return trained(None, 100, batches(ITERATIONS))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_to_the_same_bits(name: str) -> None:
    """Means of losses, parameters and the optimizer's state are the serial run's, with dropout."""
    warm_up()
    assert same(serially(), trained(PLANS[name], 0, batches(ITERATIONS)))


def difference(plan: PipelinePlan, seed: int) -> Difference | None:
    """Return the first difference between a serial and a planned training on late streams."""

    def loop(plan: PipelinePlan | None) -> Loop:
        return Loop(batches(8), Training(delays=random.Random(seed)).tasks(), plan=plan)

    with badly():
        return first_difference(lambda: loop(None), lambda: loop(plan), device=DEVICE)


@pytest.mark.usefixtures("deterministic")
def test_a_comparison_finds_no_difference_of_a_right_plan() -> None:
    """The results of each task are copied on its stream, before another one changes them."""
    for name in ("all on streams of their own", "backward on another thread"):
        assert difference(PLANS[name], 0) is None


# A run without the guard may fail in close(), too.
@pytest.mark.filterwarnings("ignore:a pipeline with iterations in flight was dropped")
@pytest.mark.usefixtures("deterministic")
def test_a_comparison_finds_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the first task, iteration and attribute that differ."""
    next(guard for guard in GUARDS if guard.name == "event waits").remove(monkeypatch)
    differences = (difference(PLANS["all on streams of their own"], seed) for seed in range(9))
    found = next(filter(None, differences))
    assert found.task in ("scale", "forward", "report")
    assert found.attribute.startswith("ctx.")
    gc.collect()  # here, where the warnings of what was dropped are ignored
