"""Costs from a pipeline: known ones come out, and everything is put back."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypedDict

import pytest
import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.errors import PlanError
from swpipe.profiler import CostModel, TaskCost, measure_costs, with_resources
from swpipe.profiler.lock import SWITCH_S, Rival
from tests.bench.timed_device import TimedDevice, TimedEvent, TimedStream
from tests.profiler.sleepers import overlapped, sleepers


class Counts(TypedDict):
    num_warmup: int
    num_measure: int


COUNTS: Counts = {"num_warmup": 1, "num_measure": 5}


def test_host_time_is_how_long_a_task_keeps_its_thread() -> None:
    """Sleeping is host time, and needs no lock."""
    tasks, truth = sleepers(read=6, forward=3)
    with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
        costs = measure_costs(pipe, [None], **COUNTS).tasks
    for name, fn in truth.items():
        assert min(fn.took_s) <= costs[name].host_us / 1e6 <= max(fn.took_s) + 1e-3
        assert costs[name].gil_us <= 0.3 * costs[name].host_us
        assert costs[name].device_us == 0.0


def python_for(seconds: float) -> Callable[[IterContext], None]:
    """Python that never lets go of the lock, unless asked to."""

    def fn(ctx: IterContext) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    return fn


def test_python_needs_the_lock_all_the_time() -> None:
    """For most of its host time, as far as a busy machine lets it be told."""
    tasks = [PipelineTask("python", python_for(4e-3))]

    def is_held() -> bool:
        with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
            cost = measure_costs(pipe, [None], **COUNTS).tasks["python"]
        assert cost.gil_us <= cost.host_us
        return cost.gil_us >= 3e3

    assert any(is_held() for _ in range(5))


def test_a_kernel_lets_go_of_the_lock() -> None:
    """One matrix product of several ms holds it for less than any Python does."""
    torch.set_num_threads(1)
    square = torch.randn(700, 700)
    tasks = [PipelineTask("product", lambda ctx: torch.mm(square, square))]

    def lets_go() -> bool:
        with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
            cost = measure_costs(pipe, [None], **COUNTS).tasks["product"]
        return cost.gil_us <= 0.7 * cost.host_us

    assert any(lets_go() for _ in range(10))  # where others use its core, the rival gets less


def test_the_lock_is_measured_when_asked_for_and_serially_only() -> None:
    """Otherwise it is 0: under the plan, waiting for it is in the host time."""
    tasks = [PipelineTask("python", python_for(2e-3))]
    with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
        assert measure_costs(pipe, [None], lock=False, **COUNTS).tasks["python"].gil_us == 0.0
        assert measure_costs(pipe, [None], pipelined=True, **COUNTS).tasks["python"].gil_us == 0.0


def test_under_the_plan_tasks_are_timed_while_others_run() -> None:
    """Whether one is alone is seen by the tasks themselves."""
    beside: list[bool] = []
    reading = [False]

    def read(ctx: IterContext) -> None:
        reading[0] = True
        time.sleep(4e-3)
        reading[0] = False

    def train(ctx: IterContext) -> None:
        time.sleep(2e-3)
        beside.append(reading[0])

    tasks = [PipelineTask("read", read), PipelineTask("train", train)]
    plan = overlapped({"io": ["read"], "default": ["train"]})
    with SWPipeline(plan, tasks) as pipe:
        measure_costs(pipe, [None], **COUNTS)
        assert not any(beside)
        measure_costs(pipe, [None], pipelined=True, **COUNTS)
        assert any(beside)


class TellingEvent(TimedEvent):
    """It also knows when the device reached it."""

    def record(self, stream: TimedStream) -> None:
        stream.put(self._note)
        super().record(stream)

    def _note(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        self._reached.wait()

    def elapsed_time(self, end_event: TellingEvent) -> float:
        return (end_event.at_s - self.at_s) * 1e3


class TellingDevice(TimedDevice):
    """Its events tell times."""

    def new_event(self, *, timing: bool = False) -> TimedEvent:
        return TellingEvent() if timing else TimedEvent()


def test_device_time_is_what_the_task_gave_to_its_stream() -> None:
    """By events around it; the host is through with it long before."""
    with TellingDevice() as device:
        tasks = [
            PipelineTask("copy", lambda ctx: device.launch(lambda: time.sleep(4e-3))),
            PipelineTask("host", lambda ctx: None),
        ]
        plan = PipelinePlan({"copy": TaskSchedule(), "host": TaskSchedule()})
        with SWPipeline(plan, tasks, device=device) as pipe:
            costs = measure_costs(pipe, [None], lock=False, **COUNTS)
    copy, host = costs.tasks["copy"], costs.tasks["host"]
    assert copy.device_us >= 3.9e3
    assert copy.host_us < copy.device_us / 2
    assert host.device_us < copy.device_us / 2


def test_batches_count_alike() -> None:
    """One of 1 ms and one of 21 ms are 11 ms on average."""
    tasks = [PipelineTask("read", lambda ctx: time.sleep(ctx.batch))]
    with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
        costs = measure_costs(pipe, [1e-3, 21e-3], lock=False, **COUNTS)
    assert 11e3 <= costs.tasks["read"].host_us < 18e3


@pytest.mark.parametrize("pipelined", [False, True], ids=["serially", "under the plan"])
def test_what_was_trained_is_put_back(pipelined: bool) -> None:
    """Parameters, and the number of the next iteration."""
    model = torch.nn.Linear(4, 1)
    before = model.weight.detach().clone()

    def train(ctx: IterContext) -> None:
        with torch.no_grad():
            model.weight += 1

    tasks = [PipelineTask("train", train)]
    with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
        measure_costs(pipe, [None], pipelined=pipelined, **COUNTS)
        assert torch.equal(model.weight, before)
        assert pipe.progress(iter([None])).iter_idx == 0


def test_it_is_put_back_when_a_task_fails_as_well() -> None:
    """And the failure is the task's own."""
    model = torch.nn.Linear(4, 1)
    before = model.weight.detach().clone()

    def train(ctx: IterContext) -> None:
        with torch.no_grad():
            model.weight += 1
        if ctx.iter_idx == 3:
            raise OverflowError("too far")

    tasks = [PipelineTask("train", train)]
    with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
        with pytest.raises(OverflowError, match="too far"):
            measure_costs(pipe, [None], **COUNTS)
        assert torch.equal(model.weight, before)


def test_the_switch_interval_is_put_back() -> None:
    """The rival shortens it for as long as it is about."""
    usual = sys.getswitchinterval()
    with Rival():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert sys.getswitchinterval() == usual


def test_nothing_to_measure_on_is_refused() -> None:
    """No batch; too few iterations; iterations under way; a closed pipeline."""
    tasks, _ = sleepers(read=0)
    plan = PipelinePlan({"read": TaskSchedule()}, pipeline_depth=2)
    with SWPipeline(plan, tasks) as pipe:
        with pytest.raises(ValueError, match="batches is empty"):
            measure_costs(pipe, [])
        with pytest.raises(ValueError, match="num_measure is 0"):
            measure_costs(pipe, [None], num_measure=0)
        pipe.progress(iter(range(5)))
        with pytest.raises(RuntimeError, match="in flight"):
            measure_costs(pipe, [None])
        pipe.drain()
    with pytest.raises(RuntimeError, match="closed"):
        measure_costs(pipe, [None])


def test_resources_are_added_by_hand() -> None:
    """To what a task has; the model given stays as it is."""
    costs = CostModel({"dist": TaskCost(1, resources=("nccl",)), "copy": TaskCost(2)}, 3.0)
    more = with_resources(costs, {"dist": ("pcie", "nccl"), "copy": "pcie"})
    assert more.tasks["dist"].resources == ("nccl", "pcie")
    assert more.tasks["copy"] == TaskCost(2, resources=("pcie",))
    assert more.handover_us == 3.0
    assert costs.tasks["copy"].resources == ()


def test_a_resource_for_a_task_without_costs_is_refused() -> None:
    """With the names that there are."""
    with pytest.raises(PlanError, match="task 'dits' has no cost"):
        with_resources(CostModel({"dist": TaskCost(1)}), {"dits": "nccl"})
