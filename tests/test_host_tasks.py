"""Tasks of the host alone: no stream, no event, and no unnecessary wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from docs.examples.published_planners.joint import joint_search
from swpipe import HOST, DeclaredIO, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.last_readers import ReleasePlace, ReleasePlaces
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.resolved import resolve_plan
from swpipe.errors import PlanError
from swpipe.planning import simulate
from swpipe.plans.prefetch import prefetch_plan
from swpipe.program import compile_plan
from tests.device.virtual import VirtualDevice
from tests.support.safety import verify_tasks

COSTS = CostModel(
    {
        "read": TaskCost(host_us=3_000),
        "copy": TaskCost(host_us=50, device_us=4_000),
        "train": TaskCost(host_us=500, device_us=10_000),
    }
)


def plan(stream: str | None = HOST, **more: Any) -> PipelinePlan:
    """Return a plan that reads and copies a batch on a thread during training."""
    return PipelinePlan(
        schedule={
            "read": TaskSchedule(thread_group="io", stream=stream),
            "copy": TaskSchedule(thread_group="io", stream="memcpy"),
            "train": TaskSchedule(stage=1),
        },
        deps=[("copy", "read"), ("train", "copy")],
        cross_iter_deps=[("train", "train")],
        **more,
    )


def test_a_copy_does_not_wait_for_the_training_before_the_read() -> None:
    """With an event of the read on the caller's stream, a step would take copy and training."""
    assert simulate(plan(), COSTS).ii_us == pytest.approx(10_000)
    assert simulate(plan(None), COSTS).ii_us == pytest.approx(14_000)


def test_all_that_a_task_of_the_host_alone_takes_is_time_of_its_thread() -> None:
    """This includes the device work of its cost, and a wait for it."""
    read = TaskCost(host_us=9_000, device_us=3_000, blocks=True)
    model = replace(COSTS, tasks={**COSTS.tasks, "read": read})
    found = simulate(plan(), model)
    assert found.ii_us == pytest.approx(12_050)
    assert HOST not in {load.name for load in found.loads}


def test_a_plan_with_such_a_task_can_be_saved_and_names_no_stream() -> None:
    """The stream's name is kept; without other streams the run-ahead has no limit."""
    assert PipelinePlan.from_toml(plan().to_toml()) == plan()
    alone = PipelinePlan({"read": TaskSchedule(stream=HOST), "train": TaskSchedule()})
    assert (plan().names_streams, alone.names_streams) == (True, False)
    assert alone.launch_limit is None


def test_a_ready_made_plan_takes_it() -> None:
    """It needs no description, and a planner neither moves it to a stream nor others to it."""
    made = prefetch_plan(["read", "copy"], ["train"], streams={"read": HOST, "copy": "memcpy"})
    assert {*made.streams} == {"memcpy"}
    compile_plan(resolve_plan(made), streams=True)
    schedule = joint_search(made, COSTS).plan.schedule
    assert (schedule["read"].stream, schedule["copy"].stream) == (HOST, "memcpy")


def before(given: PipelinePlan) -> HappensBefore:
    return HappensBefore.of(resolve_plan(given), streams=True)


def test_it_is_done_when_it_returns_and_waits_for_no_device() -> None:
    """Later tasks find its results; it waits for no device work."""
    given = plan(pipeline_depth=3)
    after_copy = replace(
        given, deps=[("train", "read"), ("read", "copy")], cross_iter_deps=[], run_ahead=9
    )
    assert before(given).keeps("read", "copy", 0)
    assert before(after_copy).host("copy", "read", 0)
    assert not before(after_copy).device("copy", "read", 0)
    assert before(after_copy).keeps("copy", "read", 0, attribute=True)
    assert before(after_copy).keeps("copy", "train", 0)


def test_a_place_where_memory_goes_waits_for_no_event_of_it() -> None:
    """It has none; the place waits for all other earlier work."""
    given = replace(plan(keep=[]), deps=[("train", "read"), ("read", "copy")])
    places = ReleasePlaces(before(given))
    assert places.behind(ReleasePlace("read", True)) == ("copy",)


def test_a_state_that_the_device_still_uses_is_refused() -> None:
    """A buffer is filled again while the previous copy may still read it."""

    def refused(**more: Any) -> str:
        io = [DeclaredIO(state="buffer", **more)]
        tasks = [PipelineTask("read", print, io=io), PipelineTask("copy", print, io=io)]
        tasks.append(PipelineTask("train", print, pure=True))
        ordered = replace(plan(), cross_iter_deps=[("train", "train"), ("read", "copy")])
        with pytest.raises(PlanError) as caught:
            verify_tasks(ordered, tasks, streams=True)
        return str(caught.value)

    assert "'read' is declared to work on the host alone" in refused()


def test_what_it_does_to_the_context_needs_no_stream() -> None:
    """It may pass on, or delete, the results of device work; that is no race."""
    tasks = [PipelineTask(name, print, pure=True) for name in ("copy", "read", "train")]
    given = replace(plan(), deps=[("read", "copy"), ("train", "read")])
    verify_tasks(given, tasks, streams=True)


def test_no_stream_is_made_current_for_it() -> None:
    """It finds the stream of the previous task, on its thread."""
    device, found = VirtualDevice(0), []
    tasks = [
        PipelineTask("copy", lambda ctx: None),
        PipelineTask("read", lambda ctx: found.append(device.current_stream())),
        PipelineTask("train", lambda ctx: found.append(device.current_stream())),
    ]
    given = PipelinePlan(
        {
            "copy": TaskSchedule(stream="memcpy"),
            "read": TaskSchedule(stream=HOST),
            "train": TaskSchedule(),
        },
        order=["copy", "read", "train"],
    )
    with SWPipeline(given, tasks, device=device) as pipe:
        pipe.run([0])
    assert found[0] is not found[1]


def test_one_that_uses_the_device_is_refused() -> None:
    """If tasks are watched, operators on the device are an error."""
    device = VirtualDevice(0)
    tasks = [
        PipelineTask("read", lambda ctx: ctx.batch.sum()),
        PipelineTask("train", lambda ctx: None),
    ]
    given = PipelinePlan({"read": TaskSchedule(stream=HOST), "train": TaskSchedule()})
    with (
        SWPipeline(given, tasks, device=device, check_effects=True) as pipe,
        pytest.raises(PlanError, match="'read' used tensors of a device on iteration 1"),
    ):
        # Of the devices, all machines have this one.
        pipe.run([torch.ones(2), torch.ones(2, device="meta")])
