"""``through`` on a device: functions after the caller's thread find complete values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import swpipe
from swpipe import on_caller
from tests import backend
from tests.device.accelerator.work import DEVICE, SIMULATED

pytestmark = pytest.mark.skipif(
    not SIMULATED or backend.why_not() is not None, reason="these tests have streams be late"
)

BATCHES = 24


@pytest.fixture(autouse=True)
def late() -> Iterator[None]:
    """Use late streams, and poison freed memory."""
    with backend.misbehaving(late_streams=200.0, poison=True, link_us_per_mib=4e5):
        yield


def filled(number: int) -> Tensor:
    return torch.full((256,), float(number))


def sums(values: Tensor) -> float:
    return float(values.cpu().sum())


def test_results_on_the_device_are_complete_behind_it() -> None:
    """The stream of a later function waits for the model, and memory is held for it."""
    loop = swpipe.through(
        range(BATCHES), filled, on_caller(lambda x: x * 2 + 1), torch.neg, sums, device=DEVICE
    )
    assert [*loop] == [-256.0 * (2 * number + 1) for number in range(BATCHES)]


def test_what_goes_to_the_host_is_copied_before_the_next_step_changes_it() -> None:
    """No later function sees it before the copy is complete."""
    weights = torch.zeros(256, device=DEVICE)

    def step(x: Tensor) -> Tensor:
        weights.add_(x)
        return weights

    def total(values: Tensor) -> float:
        assert values.device.type == "cpu"
        return float(values.sum())

    loop = swpipe.through(
        range(BATCHES), filled, on_caller(step, to_host=True), total, device=DEVICE
    )
    assert [*loop] == [256.0 * sum(range(number + 1)) for number in range(BATCHES)]
