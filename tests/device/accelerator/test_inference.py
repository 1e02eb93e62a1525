"""Recording on an accelerator: dependences as on the CPU, sufficient for any streams."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from swpipe import PipelinePlan, SWPipeline
from swpipe.analysis import verify
from swpipe.errors import PlanError
from swpipe.inference import Recording, record
from tests.device.accelerator.training import Training, badly, batches, on_host, same, trained
from tests.device.accelerator.work import DEVICE
from tests.support.plans_for_tests import scattered


def data() -> list[tuple[Tensor, Tensor]]:
    """Return ten batches."""
    return batches(10)


def recording_on(device: torch.device | str) -> Recording:
    """Return a recording of two iterations."""
    return record(Training(device).tasks(), data()[0], device=device)


@cache
def serially() -> list[Tensor]:
    """Return the results of the serial run."""
    return trained(None, 0, data())


def on_streams(plan: PipelinePlan, seed: int) -> PipelinePlan:
    """Return the plan with random stages, threads and streams."""
    rng, plan = random.Random(seed), scattered(plan, seed)
    entries = {
        name: replace(entry, stream=rng.choice((None, "one", "two")))
        for name, entry in plan.schedule.items()
    }
    return replace(plan, schedule=entries)


@pytest.fixture(scope="module")
def recording() -> Recording:
    """A recording of two iterations on the device."""
    return recording_on(DEVICE)


def test_the_device_needs_the_orders_that_the_cpu_needs(recording: Recording) -> None:
    """Parameters, gradients, momentum and counters are found on the device, too."""
    found = {one[:3] for one in recording.dependences().needed}
    assert found == {one[:3] for one in recording_on("cpu").dependences().needed}
    assert {("forward", "step", 1), ("report", "count", 0), ("count", "report", 1)} <= found


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("seed", range(3))
def test_inferred_orders_are_enough_on_any_streams(recording: Recording, seed: int) -> None:
    """Random stages, threads and streams give the serial run's bits."""
    serial = serially()
    with badly():
        plan = on_streams(recording.plan(), seed)
        assert same(trained(plan, seed, data(), check_effects=False), serial)


@pytest.mark.usefixtures("deterministic")
def test_without_the_inferred_orders_they_are_not(recording: Recording) -> None:
    """Without the order of a counter's readers and its next writer, some plan differs."""
    found = recording.plan()
    kept = [one for one in found.cross_iter_deps if one[0] != "count"]
    assert len(kept) < len(found.cross_iter_deps)
    bare = replace(found, cross_iter_deps=kept)
    serial = serially()

    def differs(seed: int) -> bool:
        return not same(trained(on_streams(bare, seed), seed, data(), check_effects=False), serial)

    assert any(differs(seed) for seed in range(6))


def test_recording_leaves_no_trace_on_the_device() -> None:
    """State and generators are as before."""
    training = Training()
    draws = torch.get_device_module(DEVICE.type).get_rng_state

    def state() -> list[Tensor]:
        return [torch.get_rng_state(), draws(), *on_host(training.tensors())]  # no moments yet

    before = state()
    record(training.tasks(), data()[0], device=DEVICE)
    assert same(before, state())


def is_stopped(plan: PipelinePlan, seed: int) -> bool:
    """Return whether the check of effects stops a run."""
    tasks = Training(delays=random.Random(seed)).tasks()
    with SWPipeline(plan, tasks, device=DEVICE, check_effects=True) as pipe:
        try:
            pipe.run(data())
        except PlanError:
            return True
    return False


@pytest.mark.parametrize("seed", range(3))
def test_a_check_of_effects_knows_the_order_of_streams(recording: Recording, seed: int) -> None:
    """It stops a run exactly if some stream may do the work of two tasks out of order."""
    found = recording.plan()
    assert not is_stopped(on_streams(found, seed), seed)
    kept = [one for one in found.cross_iter_deps if one[0] != "count"]
    bare = on_streams(replace(found, cross_iter_deps=kept), seed)
    try:
        verify(bare, recording.tasks, recording.effects, streams=True, pull_ahead=True, body=False)
    except PlanError:
        assert is_stopped(bare, seed)
    else:
        assert not is_stopped(bare, seed)
