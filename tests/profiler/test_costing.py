"""Costs of a pipeline: known ones are found, and all state is restored."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TypedDict

import pytest

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.planning import simulate
from swpipe.profiler import (
    Block,
    CostModel,
    TaskCost,
    TaskMemory,
    measure_costs,
    with_resources,
)
from swpipe.profiler.thread_costs import SWITCH_S, GilContender
from tests.profiler.sleepers import contend, overlapped, sleepers
from tests.support.notes import Notes
from tests.support.virtual_clock import TimedDevice, TimedHost, tell_time


class Counts(TypedDict):
    num_warmup: int
    num_measure: int


COUNTS: Counts = {"num_warmup": 1, "num_measure": 5}


def test_host_time_is_how_long_a_task_occupies_its_thread(host: TimedHost) -> None:
    """Sleeping counts as host time and needs no interpreter lock; batches have equal weight."""
    tasks = [PipelineTask("read", lambda ctx: host.sleep(ctx.batch)), *sleepers(host, forward=3)]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        costs = measure_costs(pipe, [1e-3, 11e-3], **COUNTS)
    assert us_of(costs, "host_us") == pytest.approx({"read": 6e3, "forward": 3e3})
    assert costs.handover_us > 0
    assert us_of(costs, "gil_us") == us_of(costs, "device_us") == {"read": 0.0, "forward": 0.0}


def us_of(costs: CostModel, field: str) -> dict[str, float]:
    """Return one of the costs, by task."""
    return {name: getattr(cost, field) for name, cost in costs.tasks.items()}


def test_gil_time_is_task_time_minus_contender_time(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it for Python, part of it for a kernel that releases the lock; at most CPU time."""
    contender = contend(monkeypatch, host)

    def kernel(ctx: IterContext) -> None:
        host.compute(4e-3)
        # Other work on the contender's core makes the result of a run too high: the least counts.
        contender.held_s += 3e-3 if ctx.iter_idx % 2 else 1e-3

    def read(ctx: IterContext) -> None:
        host.compute(1e-3)
        host.sleep(4e-3)  # and the contender, robbed of its core, gets nothing

    tasks = [
        PipelineTask("python", lambda ctx: host.compute(4e-3)),
        PipelineTask("kernel", kernel),
        PipelineTask("read", read),
    ]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        costs = measure_costs(pipe, [None], **COUNTS)
    assert us_of(costs, "gil_us") == pytest.approx({"python": 4e3, "kernel": 1e3, "read": 1e3})


def test_the_contender_counts_only_time_in_which_it_holds_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer steps of its clock are waits for the lock."""
    contender = GilContender()
    looks = iter([float(n) for n in range(51)] + [100.0, 101.0, 109.0, 110.5])

    def thread_time() -> float:
        now_s = next(looks)
        contender._stopped = now_s == 110.5
        return now_s

    monkeypatch.setattr(time, "thread_time", thread_time)
    contender._compete()
    assert contender.held_s == 1.0 + 1.5


def test_gil_time_is_measured_on_request_and_in_serial_runs_only(host: TimedHost) -> None:
    """Otherwise it is 0: under the plan, waiting for the lock is part of the host time."""
    tasks = [PipelineTask("python", lambda ctx: host.compute(2e-3))]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        for options in ({"lock": False}, {"pipelined": True}):
            cost = measure_costs(pipe, [None], **options, **COUNTS).tasks["python"]
            assert (cost.host_us, cost.gil_us) == (pytest.approx(2e3), 0.0)


def test_under_the_plan_tasks_are_timed_while_others_run(host: TimedHost) -> None:
    """The tasks themselves record whether another one runs."""
    beside = Notes()
    reading = [False]

    def read(ctx: IterContext) -> None:
        reading[0] = True
        host.sleep(4e-3)
        reading[0] = False

    def train(ctx: IterContext) -> None:
        host.sleep(2e-3)
        beside.append(reading[0])

    tasks = [PipelineTask("read", read), PipelineTask("train", train)]
    plan = overlapped({"io": ["read"], "default": ["train"]})
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        measure_costs(pipe, [None], **COUNTS)
        assert not any(beside.read())
        measure_costs(pipe, [None], pipelined=True, **COUNTS)
        assert any(beside.read())


def test_device_time_is_the_time_of_a_tasks_work_on_its_stream(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events measure it; the host returns earlier."""
    device = TimedDevice(host)
    tell_time(monkeypatch, host, device)

    def copy(ctx: IterContext) -> None:
        device.launch(4e-3)
        host.sleep(1e-3)

    tasks = [PipelineTask("copy", copy), PipelineTask("host", lambda ctx: None)]
    plan = PipelinePlan({"copy": TaskSchedule(), "host": TaskSchedule()})
    with SWPipeline(plan, tasks, device=device) as pipe:
        for pipelined in (False, True):
            costs = measure_costs(pipe, [None], lock=False, pipelined=pipelined, **COUNTS)
            assert us_of(costs, "device_us") == pytest.approx({"copy": 4e3, "host": 0.0})
            assert us_of(costs, "host_us") == pytest.approx({"copy": 1e3, "host": 0.0})


@pytest.mark.parametrize("pipelined", [False, True], ids=["serially", "under the plan"])
def test_a_task_that_waits_for_the_device_is_found(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    """Its host time is without the wait; reading while the device catches up is no wait.

    Reading takes none of the device's time, which has other work in the meantime.
    """
    device = TimedDevice(host)
    tell_time(monkeypatch, host, device)

    def item(ctx: IterContext) -> None:
        host.sleep(1e-3)
        device.launch(0.5e-3)
        device.synchronize()

    tasks = [
        PipelineTask("train", lambda ctx: device.launch(6e-3)),
        PipelineTask("read", lambda ctx: host.sleep(2e-3)),
        PipelineTask("item", item),
    ]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device=device) as pipe:
        costs = measure_costs(pipe, [None], lock=False, pipelined=pipelined, **COUNTS)
    assert us_of(costs, "blocks") == {"train": False, "read": False, "item": True}
    assert us_of(costs, "host_us") == pytest.approx({"train": 0.0, "read": 2e3, "item": 1e3})
    assert us_of(costs, "device_us") == pytest.approx({"train": 6e3, "read": 0.0, "item": 500.0})
    assert simulate(pipe.plan, costs).ii_us == pytest.approx(6.5e3)


def test_what_only_looks_like_waiting_for_the_device_is_told_from_it(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full queue leaves the device work; reading takes as long on an idle device."""
    device = TimedDevice(host)
    tell_time(monkeypatch, host, device)

    def many(ctx: IterContext) -> None:
        device.launch(6e-3)
        host.sleep_until(device.current_stream().end_ns - 4_000_000)  # what the queue has room for

    tasks = [
        PipelineTask("train", lambda ctx: device.launch(6e-3)),
        PipelineTask("many", many),
        PipelineTask("read", lambda ctx: host.sleep(9e-3)),
    ]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device=device) as pipe:
        costs = measure_costs(pipe, [None], lock=False, **COUNTS)
    assert us_of(costs, "blocks") == {"train": False, "many": False, "read": False}


def test_device_time_has_no_idle_time_if_the_device_is_behind(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is idle while the first task of a serial iteration reads, and not in training."""
    device = TimedDevice(host)
    tell_time(monkeypatch, host, device)
    tasks = [
        PipelineTask("read", lambda ctx: host.sleep(3e-3)),
        PipelineTask("train", lambda ctx: device.launch(9e-3)),
    ]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device=device) as pipe:
        costs = measure_costs(pipe, [None], lock=False, **COUNTS)
    assert us_of(costs, "device_us") == pytest.approx({"read": 0.0, "train": 9e3})
    assert simulate(pipe.plan, costs).ii_us == pytest.approx(9e3)


def test_the_switch_interval_is_restored() -> None:
    """The contender shortens it while it runs."""
    usual = sys.getswitchinterval()
    with GilContender():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert sys.getswitchinterval() == usual


def test_a_handover_costs_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All times of a cost model are in microseconds."""
    monkeypatch.setattr("swpipe.profiler.costing.measure_handover_s", lambda host: 12e-6)
    tasks = [PipelineTask("a", lambda ctx: None, pure=True)]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        assert measure_costs(pipe, [0], 1, 1, lock=False).handover_us == pytest.approx(12)


def test_resources_are_added() -> None:
    """They are added to a task's own; the given model is not modified, and keeps all else."""
    memory = TaskMemory((Block("dist", "copy", 8, "x"),))
    costs = CostModel({"dist": TaskCost(1, resources=("nccl",)), "copy": TaskCost(2)}, 3.0, memory)
    more = with_resources(costs, {"dist": ("pcie", "nccl"), "copy": "pcie"})
    assert more.tasks["dist"].resources == ("nccl", "pcie")
    assert more.tasks["copy"] == TaskCost(2, resources=("pcie",))
    assert (more.handover_us, more.memory) == (3.0, memory)
    assert costs.tasks["copy"].resources == ()


class Loader:
    """A loader of three batches per pass: 2 ms of work and 3 ms of wait each, and a slow start."""

    def __init__(self, host: TimedHost) -> None:
        self.host = host

    def __iter__(self) -> Iterator[int]:
        self.host.sleep(0.0 if self.host.now_ns else 1.0)
        for batch in range(3):
            self.host.compute(2e-3)
            self.host.sleep(3e-3)
            yield batch


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_loader_has_a_cost_too(host: TimedHost, pipelined: bool) -> None:
    """It is the time of a call, without the first one, in which the loader starts."""
    (task,) = sleepers(host, use=1)
    plan = PipelinePlan({"use": TaskSchedule()}, pull_group="loader")
    counts = {**COUNTS, "pipelined": pipelined}
    with SWPipeline(plan, [task], device="cpu") as pipe:
        with_loader = measure_costs(pipe, [1, 2], loader=Loader(host), **counts).tasks
        assert with_loader["<pull>"].host_us == pytest.approx(5e3)
        assert with_loader["<pull>"].gil_us == pytest.approx(0 if pipelined else 2e3)
        assert with_loader["use"].host_us == pytest.approx(1e3)
        assert "<pull>" not in measure_costs(pipe, [1, 2], **counts).tasks
