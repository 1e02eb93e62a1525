"""Edges that order the functions of two tasks, but no work on streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swpipe import DeclaredIO, PipelinePlan, PipelineTask, TaskSchedule
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.validation import validate
from swpipe.core.resolved import resolve_plan
from swpipe.errors import PlanError
from swpipe.program import compile_plan
from swpipe.schedulable import SameProgressSyncSide, Schedule, Stage, StreamPool, Task
from swpipe.schedulable.translation import translate
from tests.support.safety import verify_tasks

PAIR = ("prefetch", "forward")


def plan(**given: Any) -> PipelinePlan:
    """Return a plan of a prefetch on its own thread and stream, after this period's forward."""
    schedule = {"prefetch": TaskSchedule(0, "side", "io"), "forward": TaskSchedule(1)}
    return PipelinePlan(schedule, same_period_deps=[PAIR], **given)


def test_the_host_waits_and_no_stream() -> None:
    """The host wait stays, the event goes; therefore the device is not ordered."""
    both, alone = (
        compile_plan(resolve_plan(p), streams=True) for p in (plan(), plan(host_only=[PAIR]))
    )
    assert [
        w.producer for w in both.instructions["prefetch"].event_waits if w.producer == "forward"
    ]
    assert not [w for w in alone.instructions["prefetch"].event_waits if w.producer == "forward"]
    waits = [{w.producer for w in p.instructions["prefetch"].host_waits} for p in (both, alone)]
    assert waits[0] == waits[1]
    before = HappensBefore.of(resolve_plan(plan(host_only=[PAIR])), streams=True)
    assert before.host("forward", "prefetch", 1)
    assert not before.device("forward", "prefetch", 1)


def test_streams_wait_for_all_other_edges() -> None:
    """Each edge is host_only by itself."""
    given = plan(host_only=[PAIR])
    schedule = {**given.schedule, "decode": TaskSchedule(1, "third")}
    beside = replace(given, schedule=schedule, deps=[("forward", "decode")])
    program = compile_plan(resolve_plan(beside), streams=True)
    assert "decode" in {wait.producer for wait in program.instructions["forward"].event_waits}
    before = HappensBefore.of(resolve_plan(beside), streams=True)
    assert before.device("decode", "forward", 0)
    assert not before.device("forward", "prefetch", 1)


@pytest.mark.parametrize("on_host", [False, True])
def test_it_protects_what_python_uses_on_the_host(on_host: bool) -> None:
    """It protects a counter; memory on two streams is refused with the pair and the reason."""
    io = [DeclaredIO(state="count", on_host=on_host)]
    tasks = [PipelineTask(name, print, io) for name in ("forward", "prefetch")]
    of = PipelinePlan(
        {"forward": TaskSchedule(), "prefetch": TaskSchedule(0, "side", "io")},
        deps=[PAIR],
        cross_iter_deps=[PAIR[::-1]],
        host_only=[PAIR],
    )
    try:
        verify_tasks(of, tasks, streams=True)
        found = ""
    except PlanError as error:
        found = str(error)
    assert ("which orders their functions and not their work on streams" in found) is not on_host


def test_a_pair_without_an_edge_is_refused() -> None:
    """It marks edges that are declared."""
    with pytest.raises(PlanError, match="no dependence is declared between these two"):
        validate(plan(host_only=[PAIR[::-1]]))
    with pytest.raises(ValueError, match="give no memory of tensors"):
        DeclaredIO(state="x", on_host=True, memory=[1])


def test_a_lookahead_tasks_side_becomes_it() -> None:
    """The side is the CPU alone; a task that declares none waits on both sides."""

    def translated(**given: Any) -> PipelinePlan:
        tasks = (
            Task.from_fn("forward", print),
            Task.from_fn("prefetch", print, same_progress_sync=("forward",), **given),
        )
        schedule = Schedule((Stage(tasks),), ("default",))
        names = {task.name: "default" for task in tasks}
        return translate(schedule, StreamPool({"default": None}), names)

    assert translated().host_only == ()
    assert translated(same_progress_sync_sides=SameProgressSyncSide.CPU).host_only == (PAIR,)
    assert translated(same_progress_sync_sides=2).host_only == ()
    with pytest.raises(ValueError, match="unknown bits"):
        translated(same_progress_sync_sides=4)
