"""The plan that prepares batches ahead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from swpipe import PipelinePlan, PipelineTask, StreamSpec, SWPipeline, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.device import copy_task
from swpipe.pipeline import settle
from swpipe.planning import lower_bounds, simulate
from swpipe.plans import prefetch_plan


def test_it_equals_a_plan_written_by_hand() -> None:
    """Pulling and feeding run ahead, on separate threads; each list is in order."""
    plan = prefetch_plan(
        ["read", "copy"],
        ["forward", "step"],
        carried=[("forward", "step")],
        streams={"copy": "memcpy"},
    )
    assert plan == PipelinePlan(
        schedule={
            "read": TaskSchedule(stage=0, thread_group="io"),
            "copy": TaskSchedule(stage=0, stream="memcpy", thread_group="io"),
            "forward": TaskSchedule(stage=1),
            "step": TaskSchedule(stage=1),
        },
        deps=[("copy", "read"), ("forward", "copy"), ("step", "forward")],
        cross_iter_deps=[("forward", "step")],
        streams={"memcpy": StreamSpec()},
        pipeline_depth=4,
        pull_group="loader",
    )


def test_each_further_worker_has_an_iteration_in_flight() -> None:
    """It is in addition to those of the depth, and to the one that is pulled."""
    for workers, pull_group, depth in ((1, "loader", 4), (3, "loader", 6), (3, None, 5)):
        plan = prefetch_plan(["read"], ["use"], workers=workers, pull_group=pull_group)
        assert plan.depth == depth
        assert plan.schedule["read"].workers == workers


def test_what_comes_after_a_copy_has_another_stream() -> None:
    """The copy of the next batch does not wait for it; earlier tasks are on the copy's stream."""
    feed = [PipelineTask("pin", print), copy_task("cpu"), PipelineTask("embed", print)]
    plan = prefetch_plan(feed, ["use"])
    streams = {name: entry.stream for name, entry in plan.schedule.items()}
    assert streams == {"pin": "copy", "copy": "copy", "embed": "ahead", "use": None}


@pytest.mark.parametrize("maxsize", [1, 2, 4])
def test_it_is_as_far_ahead_as_a_thread_with_a_queue(maxsize: int) -> None:
    """Beyond the caller's iteration there are the queue, and the batch that waits for the queue."""
    pulled: list[int] = []

    def data() -> Iterator[int]:
        for batch in range(20):
            pulled.append(batch)
            yield batch

    batches = data()
    tasks = [PipelineTask(name, lambda ctx: None) for name in ("feed", "use")]
    plan = prefetch_plan(["feed"], ["use"], depth=maxsize + 1)
    assert plan.depth == maxsize + 2
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        for number in range(5):
            assert pipe.progress(batches).iter_idx == number
            settle(pipe)
            assert len(pulled) == number + 1 + maxsize + 1


def test_by_default_it_is_as_far_ahead_as_is_needed() -> None:
    """It is within hand-overs of the lower bound for any host and device times."""
    plan = prefetch_plan(["read", "copy"], ["train"], streams={"read": "copy", "copy": "copy"})
    for read_ms, host_ms, device_ms, blocks in product(
        (0, 5, 12), (0.5, 6), (1, 10), (False, True)
    ):
        costs = CostModel(
            {
                "read": TaskCost(1e3 * read_ms),
                "copy": TaskCost(50, device_us=2e3, blocks=blocks),
                "train": TaskCost(1e3 * host_ms, device_us=1e3 * device_ms),
            },
            handover_us=20,
        )
        assert simulate(plan, costs).ii_us <= lower_bounds(plan, costs).ii_us + 2 * 20


def test_what_cannot_prefetch_is_refused() -> None:
    """These are an empty list, and a depth with which nothing runs ahead."""
    for feed, compute, depth, told in [
        ([], ["forward"], 3, "feed or compute is empty"),
        (["read"], [], 3, "feed or compute is empty"),
        (["read"], ["forward"], 1, "depth is 1"),
    ]:
        with pytest.raises(ValueError, match=told):
            prefetch_plan(feed, compute, depth=depth)
