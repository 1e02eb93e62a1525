"""Plans tried side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from tqdm import TMonitor

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.profiler import measure_costs, measure_memory
from swpipe.tuning.autotuning import Loop
from swpipe.tuning.budget import Window
from tests.profiler.sleepers import InTurn, sleepers
from tests.support.virtual_clock import TimedHost

SERIAL = PipelinePlan({"read": TaskSchedule(), "work": TaskSchedule()}, deps=[("work", "read")])
BESIDE = PipelinePlan(
    {"read": TaskSchedule(thread_group="io"), "work": TaskSchedule(stage=1)},
    deps=[("work", "read")],
)


def tried(
    tasks: list[PipelineTask],
    plans: dict[str, PipelinePlan],
    loader: Any = None,
    batches: Sequence[Any] = (1, 2),
) -> dict[str, float]:
    """Return the seconds of an iteration under each plan, in one turn."""
    return Loop(tasks, batches, "cpu", loader=loader).try_round(plans, 0, Window(2, 6))


def test_the_result_is_the_iteration_time_under_each_plan(host: TimedHost) -> None:
    """Tasks of 4 and 3 ms run one after the other or at the same time."""
    tasks = sleepers(host, read=4, work=3)
    took_s = tried(tasks, {"serial": SERIAL, "beside": BESIDE})
    assert list(took_s) == ["serial", "beside"]
    assert took_s == pytest.approx({"serial": 7e-3, "beside": 4e-3})


def test_a_loader_is_called_in_each_iteration(host: TimedHost) -> None:
    """It takes 5 ms, on the caller's thread or in parallel with the tasks."""
    tasks = sleepers(host, read=4, work=3)
    plans = {"serial": SERIAL, "pulled ahead": replace(SERIAL, pull_group="loader")}
    took_s = tried(tasks, plans, InTurn(host, 5, length=1))
    assert took_s == pytest.approx({"serial": 12e-3, "pulled ahead": 7e-3})


def test_plans_are_tried_in_turns() -> None:
    """The second turn begins with the last plan of the first one: none is always first."""
    threads: list[str] = []

    def read(ctx: IterContext) -> None:
        threads.append("beside" if threading.current_thread().name != caller else "serial")

    caller = threading.current_thread().name
    tasks = [PipelineTask("read", read), PipelineTask("work", lambda ctx: None)]
    loop = Loop(tasks, [1, 2], "cpu", state=[])
    for turn in range(2):
        loop.try_round({"serial": SERIAL, "beside": BESIDE}, turn, Window(1, 1))
    assert [name for name, _ in groupby(threads)] == ["serial", "beside", "serial"]


def costs(tasks: list[PipelineTask], batch: Any) -> None:
    with SWPipeline(BESIDE, tasks) as pipe:
        try:
            measure_costs(pipe, [batch], 1, 2, pipelined=True)
        finally:
            assert pipe.next_iteration == 0


MEASURES: dict[str, Callable[[list[PipelineTask], Any], object]] = {
    "plans": lambda tasks, batch: tried(tasks, {"beside": BESIDE}, batches=[batch]),
    "costs": costs,
    "memory": lambda tasks, batch: measure_memory(tasks, [batch], device="cpu"),
}


def running() -> set[threading.Thread]:
    """Return the running threads, except those of progress bars."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, TMonitor)}


@pytest.mark.parametrize("measure", MEASURES)
def test_whatever_is_measured_trained_state_is_restored(measure: str) -> None:
    """It is restored after a failure, too; no thread remains."""
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    threads = running()

    def work(ctx: IterContext) -> None:
        with torch.no_grad():
            model.weight.add_(1)
        if ctx.batch == "bad":
            raise OSError("the disk is gone")

    tasks = [PipelineTask("read", lambda ctx: None), PipelineTask("work", work)]
    MEASURES[measure](tasks, 1)
    assert torch.equal(model.weight, before)
    with pytest.raises(OSError, match="the disk is gone"):
        MEASURES[measure](tasks, "bad")
    assert torch.equal(model.weight, before)
    assert running() == threads
