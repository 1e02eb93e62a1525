"""The limit of the host's run-ahead, as users set it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import swpipe
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.device.cpu import NoEvent
from swpipe.errors import PlanError
from swpipe.schedulable import SchedulablePipeline, Schedule, Stage, StreamPool, Task
from tests.device.virtual import VirtualDevice
from tests.support.stream_device import StreamDevice

MEANS_NOTHING = "run_ahead=2 has no effect on 'cpu', which has no streams"


def nothing(ctx: IterContext) -> None:
    """Do nothing."""


def on_streams(**given: Any) -> PipelinePlan:
    """Return a plan of a copy on its own stream, and training on the caller's."""
    return PipelinePlan(
        {
            PipelineTask("copy", nothing): TaskSchedule(0, "memcpy"),
            PipelineTask("train", nothing): TaskSchedule(1),
        },
        deps=[("train", "copy")],
        **given,
    )


@pytest.mark.parametrize("wrong", [-1, 1_001, True])
def test_what_is_no_number_of_iterations_is_refused(wrong: Any) -> None:
    """The plan refuses it, no matter which function got it."""
    rule = f"run_ahead is {wrong!r}: give how many iterations the host may launch ahead"
    with pytest.raises(PlanError, match=rule):
        SWPipeline(on_streams(run_ahead=wrong), device=VirtualDevice(0))
    with pytest.raises(PlanError, match=rule):
        overlapped(run_ahead=wrong)


def test_the_default_is_one_iteration_or_no_limit() -> None:
    """The device has a whole period launched by default, or there is no limit."""
    device = VirtualDevice(0)
    with SWPipeline(on_streams(run_ahead=2), device=device) as pipe:
        assert pipe.plan.run_ahead == pipe.plan.launch_limit == 2
    with SWPipeline(on_streams(), device=device) as pipe:
        assert pipe.plan.launch_limit == 1
    one_stream = replace(on_streams(), schedule={"copy": TaskSchedule(), "train": TaskSchedule(1)})
    with SWPipeline(one_stream, device=device) as pipe:
        assert pipe.plan.launch_limit is None


class AskedDevice(StreamDevice[str]):
    """An idle device that records how many batches were pulled at each query.

    Attributes:
        pulled: The number of pulled batches.
        asked: The notes.
    """

    def __init__(self) -> None:
        super().__init__("the caller's")
        self.pulled = 0
        self.asked: list[int] = []

    def new_stream(self, spec: Any) -> str:
        return "memcpy"

    def new_event(self, *, timing: bool = False) -> Any:
        return AskedEvent(self)

    def batches(self, count: int) -> Iterator[int]:
        """Yield so many batches, and count them."""
        for batch in range(count):
            self.pulled += 1
            yield batch


class AskedEvent(NoEvent):
    """An event of an ``AskedDevice``."""

    def __init__(self, device: AskedDevice) -> None:
        self._device = device

    def query(self) -> bool:
        self._device.asked.append(self._device.pulled)
        return True


@pytest.mark.parametrize(("depth", "ahead"), [(2, 0), (2, 1), (2, 3), (4, 2)])
def test_the_host_waits_for_no_nearer_iteration_than_that(depth: int, ahead: int) -> None:
    """It admits ``depth + run_ahead`` iterations before it asks, and counts on in a later run."""
    device = AskedDevice()
    with SWPipeline(on_streams(pipeline_depth=depth, run_ahead=ahead), device=device) as pipe:
        assert len([*pipe.iterate(device.batches(depth + ahead))]) == depth + ahead
        device.asked.clear()  # by the pull that found the end of the data
        assert len([*pipe.iterate(device.batches(2))]) == 2
        assert device.asked[0] == depth + ahead
    device = AskedDevice()
    with SWPipeline(on_streams(pipeline_depth=depth, run_ahead=ahead), device=device) as pipe:
        assert len([*pipe.iterate(device.batches(12))]) == 12
    assert device.asked == [*range(depth + ahead, 13)]


def schedulable(**options: Any) -> PipelinePlan:
    """Return the plan of a schedule with one task."""
    schedule = Schedule((Stage((Task.from_fn("step", lambda ctx: None),)),), ("default",))
    with SchedulablePipeline(
        schedule, StreamPool({"default": None}), device="cpu", **options
    ) as pipe:
        return pipe.pipe.plan


def overlapped(**options: Any) -> PipelinePlan:
    """Return the plan of an overlapped loop."""
    with swpipe.overlap([1, 2], [nothing], device="cpu", **options) as loop:
        return loop.pipe.plan


def sparse_dist(**options: Any) -> PipelinePlan:
    """Return the plan of one of TorchRec's classes."""
    pipelines = pytest.importorskip("swpipe.tasks.torchrec")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = pipelines.TrainPipelineSparseDist(model, optimizer, torch.device("cpu"), **options)
    found: PipelinePlan = made.pipe.plan
    made.close()
    return found


def hstu(**options: Any) -> PipelinePlan:
    """Return the plan of HSTU's pipeline."""
    module = pytest.importorskip("swpipe.tasks.torchrec.hstu")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with module.HSTUPipeline(model, optimizer, torch.device("cpu"), **options) as pipe:
        found: PipelinePlan = pipe.pipe.plan
    return found


FRONTS: dict[str, Callable[..., PipelinePlan]] = {
    "overlap": overlapped,
    "schedulable": schedulable,
    "sparse dist": sparse_dist,
    "hstu": hstu,
}


@pytest.mark.parametrize("front", FRONTS)
def test_every_front_end_takes_it_and_says_where_it_means_nothing(front: str) -> None:
    """It has no effect on a CPU, which is never behind the host."""
    with pytest.warns(RuntimeWarning, match=MEANS_NOTHING):
        assert FRONTS[front](run_ahead=2).run_ahead == 2
    assert FRONTS[front]().run_ahead is None
