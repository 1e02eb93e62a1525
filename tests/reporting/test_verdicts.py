"""Loops whose truth is known by construction: the step, what bounds it, and what to do first.

They stand on a virtual clock.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from swpipe import DeclaredIO, PipelinePlan, PipelineTask, TaskSchedule, report
from tests.profiler.sleepers import Ahead, InTurn
from tests.reporting.loops import takes
from tests.support.virtual_clock import TimedHost


class Case(NamedTuple):
    """A loop, and what is true of it.

    ``tasks``: Name to milliseconds on the CPU, or off it if negative; "train" has a state, the
    others are pure. ``loader``: Its class and arguments. ``plan``: Tasks on a thread, a stage
    ahead. ``step``, ``saves``: Milliseconds; None if it is not of interest. ``first``: How the
    advice begins.
    """

    tasks: Mapping[str, float]
    loader: tuple[Any, ...] | None
    step: float
    bound: str
    first: str
    saves: float | None = None
    ahead: tuple[str, ...] = ()


LOADER_THREAD = "Call the loader on a thread of its own"
CASES = {
    "nothing to overlap": Case({"train": 30}, None, 30, "compute-bound", "Make train take half"),
    "a decode": Case({"decode": 15, "train": 25}, None, 40, "compute-bound", "Run", 15),
    "a long decode": Case({"decode": 30, "train": 10}, None, 40, "input-bound", "Run", 10),
    "two that feed": Case(
        {"read": -10, "decode": 10, "train": 30}, None, 50, "compute-bound", "Run", 20
    ),
    "a task that waits": Case({"train": 10, "log": -30}, None, 40, "host-bound", "Run", 10),
    "a loader in turn": Case({"train": 30}, (InTurn, 20), 50, "compute-bound", LOADER_THREAD, 20),
    "a slow loader in turn": Case(
        {"train": 20}, (InTurn, 60), 80, "input-bound", LOADER_THREAD, 20
    ),
    "a loader in turn and a decode": Case(
        {"decode": 10, "train": 30}, (InTurn, 15), 55, "compute-bound", "Run", 25
    ),
    "a fast loader that works ahead": Case(
        {"train": 30}, (Ahead, 20), 30, "compute-bound", "Make train take half"
    ),
    "one as fast as the step": Case(
        {"train": 30}, (Ahead, 29), 30, "compute-bound", "Overlap can gain nothing more"
    ),
    "one a little slower": Case({"train": 30}, (Ahead, 36), 36, "input-bound", "Make a batch", 6),
    "a slow one": Case({"train": 30}, (Ahead, 60), 60, "input-bound", "Make a batch", 30),
    "a very slow one": Case({"train": 15}, (Ahead, 100), 100, "input-bound", "Make a batch", 85),
    "a slow one and a decode": Case(
        {"decode": 20, "train": 20}, (Ahead, 60), 60, "input-bound", "Make a batch", 20
    ),
    "a fast one and a decode": Case(
        {"decode": 15, "train": 25}, (Ahead, 10), 40, "compute-bound", "Run decode", 15
    ),
    "slow passes": Case(
        {"train": 20}, (Ahead, 1, 1000, 20), 70, "input-bound", "Make the start of a pass", 50
    ),
    "passes that begin a little slowly": Case(
        {"train": 30}, (Ahead, 10, 100, 20), 35, "compute-bound", "Make the start of a", 5
    ),
    "a loader that is slow in both ways": Case(
        {"train": 20}, (Ahead, 40, 400, 20), 60, "input-bound", "Make", 20
    ),
    "a plan that hides a decode": Case(
        {"decode": 20, "train": 30}, None, 30, "compute-bound", "Make train", None, ("decode",)
    ),
    "a plan whose decode is too slow": Case(
        {"decode": 40, "train": 30}, None, 40, "input-bound", "Make decode", None, ("decode",)
    ),
    "a plan with two busy threads": Case(
        {"decode": 30, "train": 30}, None, 30, "balanced", "", None, ("decode",)
    ),
    "a plan over a slow loader": Case(
        {"decode": 20, "train": 30}, (Ahead, 60), 60, "input-bound", "Make a batch", None,
        ("decode",),
    ),
}  # fmt: skip


def tasks_of(host: TimedHost, tasks_ms: Mapping[str, float]) -> list[PipelineTask]:
    """Each reads what the one before it made."""
    found: list[PipelineTask] = []
    for name, ms in tasks_ms.items():
        fn = takes(host, computes_ms=max(0, ms), waits_ms=max(0, -ms))

        def run(ctx: Any, name: str = name, fn: Any = fn, before: Any = found[-1:]) -> None:
            for one in before:
                getattr(ctx, one.name)
            fn(ctx)
            setattr(ctx, name, 1)

        said: dict[str, Any] = {"pure": True}
        if name in ("train", "log"):
            said = {"io": [DeclaredIO(state=name, mode="rw", others="")]}
        found.append(PipelineTask(name, run, **said))
    return found


def plan_of(case: Case) -> PipelinePlan | None:
    if not case.ahead:
        return None
    names = list(case.tasks)
    schedule = {
        name: TaskSchedule(0, thread_group="io") if name in case.ahead else TaskSchedule(1)
        for name in names
    }
    return PipelinePlan(
        schedule,
        deps=list(zip(names[1:], names, strict=False)),
        cross_iter_deps=[("train", "train", 1)],
    )


@pytest.mark.parametrize("name", CASES)
def test_a_report_says_what_is_true(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The step within its interval; the verdict; the first advice, and what it saves."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    case = CASES[name]
    loader = None if case.loader is None else case.loader[0](host, *case.loader[1:])
    found = report(
        tasks_of(host, case.tasks), range(8), plan=plan_of(case), loader=loader, rounds=3
    )
    step = found.profile.step
    assert abs(1e3 * step.value_s - case.step) <= 1e3 * step.spread_s + 0.02 * case.step
    assert found.verdict.bound == case.bound
    assert found.next_step.startswith(case.first)
    if case.saves is not None:
        advice = found.changes[0].advice
        assert abs(1e3 * advice.saved_s - case.saves) <= 1e3 * advice.spread_s + 0.05 * case.saves
    for one in found.changes:
        if one.advice.plan:
            assert one.advice.saved_s <= found.ceiling.saved_s
            assert one.kept
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.profile.baseline_s)
