"""Calls that are refused before any task runs, with the error and its words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskProfiler, TaskSchedule
from swpipe.errors import PlanError
from swpipe.profiler import (
    CostModel,
    TaskCost,
    measure_costs,
    measure_memory,
    with_resources,
)

Call = Callable[[SWPipeline], Any]


def profile(**given: Any) -> Call:
    return lambda pipe: TaskProfiler(pipe).profile_many(**{"batches": [0], **given})


def costs(**given: Any) -> Call:
    return lambda pipe: measure_costs(pipe, **{"batches": [0], **given})


def with_shortcut(pipe: SWPipeline) -> None:
    pipe.enable_shortcut("read")
    TaskProfiler(pipe).profile(0, tasks=["read"])


def in_flight(call: Call, pipe: SWPipeline) -> None:
    pipe.progress(iter(range(5)))
    try:
        call(pipe)
    finally:
        assert len(pipe.drain()) == 1  # they stay in flight


def closed(call: Call, pipe: SWPipeline) -> None:
    pipe.close()
    call(pipe)


RUN = r"iterations are in flight \(1\).*drain\(\)"
SHORTCUT = r"'read' is shortcut.*disable_shortcut\('read'\)"
ENDED = "has ended and cannot be restarted"

REFUSED: list[tuple[Call, type[Exception], str]] = [
    (profile(num_warmup=-1), ValueError, "num_warmup is -1: give a whole number, 0 or more"),
    (profile(num_measure=0), ValueError, "num_measure is 0: give a whole number, 1 or more"),
    (profile(num_measure=2.5), ValueError, r"num_measure is 2\.5: give a whole number"),
    (profile(num_rounds=1), ValueError, "num_rounds is 1: give a whole number, 2 or more"),
    (profile(seconds=0.0), ValueError, r"seconds is 0\.0: give a number greater than 0"),
    (profile(target_spread_ms=-1), ValueError, "target_spread_ms is -1: give a number greater"),
    (profile(batches=[]), ValueError, "batches is empty"),
    (profile(tasks=["reads"]), ValueError, "no task 'reads'; it has read"),
    (profile(tasks=[]), ValueError, "there is no task to measure"),
    (with_shortcut, ValueError, SHORTCUT),
    (lambda pipe: TaskProfiler(pipe, state=[pipe, {}]), TypeError, "cannot be restored"),
    (partial(in_flight, profile()), RuntimeError, RUN),
    (partial(closed, profile()), RuntimeError, "closed: make a new one"),
    (costs(batches=[]), ValueError, "batches is empty"),
    (costs(num_measure=0), ValueError, "num_measure is 0"),
    (costs(loader=iter([1, 2])), ValueError, ENDED),
    (costs(loader=[]), ValueError, ENDED),
    (partial(in_flight, costs()), RuntimeError, RUN),
    (partial(closed, costs()), RuntimeError, "closed"),
    (lambda pipe: measure_memory(pipe.tasks, []), ValueError, "give at least one batch"),
    (
        lambda pipe: with_resources(CostModel({"dist": TaskCost(1)}), {"dits": "nccl"}),
        PlanError,
        "task 'dits' has no cost",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_is_refused(call: Call, error: type[Exception], words: str) -> None:
    """The error has the value, the rule and the fix."""
    plan = PipelinePlan({"read": TaskSchedule()}, pipeline_depth=2)
    tasks = [PipelineTask("read", lambda ctx: None)]
    with SWPipeline(plan, tasks, device="cpu") as pipe, pytest.raises(error, match=words):
        call(pipe)
