"""Loops whose truth is known by construction: the step, what bounds it, and what to do first.

They stand on a virtual clock in the tests, and on a real one in ``python -m bench verdicts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from swpipe import DeclaredIO, PipelinePlan, PipelineTask, TaskSchedule
from tests.reporting.loops import Clock, takes


class Case(NamedTuple):
    """A loop, and what is true of it.

    Attributes:
        tasks: Name to milliseconds on the CPU, or off it if negative; "train" and "log" have a
            state, the others are pure.
        loader: Whether it works ahead, the milliseconds of a batch, and if they count those of the
            start of a pass, and the batches of a pass; None if batches cost nothing.
        step: Milliseconds.
        first: How the advice begins.
        saves: Milliseconds that it saves; None if that is not of interest.
        ahead: Tasks on a thread of their own, a stage ahead.
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
    "a loader in turn": Case(
        {"train": 30}, ("in turn", 20), 50, "compute-bound", LOADER_THREAD, 20
    ),
    "a slow loader in turn": Case(
        {"train": 20}, ("in turn", 60), 80, "input-bound", LOADER_THREAD, 20
    ),
    "a loader in turn and a decode": Case(
        {"decode": 10, "train": 30}, ("in turn", 15), 55, "compute-bound", "Run", 25
    ),
    "a fast loader that works ahead": Case(
        {"train": 30}, ("ahead", 20), 30, "compute-bound", "Make train take half"
    ),
    "one as fast as the step": Case(
        {"train": 30}, ("ahead", 28), 30, "compute-bound", "Overlap can gain nothing more"
    ),
    "one a little slower": Case({"train": 30}, ("ahead", 36), 36, "input-bound", "Make a batch", 6),
    "a slow one": Case({"train": 30}, ("ahead", 60), 60, "input-bound", "Make a batch", 30),
    "a very slow one": Case({"train": 15}, ("ahead", 100), 100, "input-bound", "Make a batch", 85),
    "a slow one and a decode": Case(
        {"decode": 20, "train": 20}, ("ahead", 60), 60, "input-bound", "Make a batch", 20
    ),
    "a fast one and a decode": Case(
        {"decode": 15, "train": 25}, ("ahead", 10), 40, "compute-bound", "Run decode", 15
    ),
    "slow passes": Case(
        {"train": 20}, ("ahead", 1, 1000, 20), 70, "input-bound", "Make the start of a pass", 50
    ),
    "passes that begin a little slowly": Case(
        {"train": 30}, ("ahead", 10, 100, 20), 35, "compute-bound", "Make the start of a", 5
    ),
    "a loader that is slow in both ways": Case(
        {"train": 20}, ("ahead", 40, 400, 20), 60, "input-bound", "Make", 20
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
        {"decode": 20, "train": 30}, ("ahead", 60), 60, "input-bound", "Make a batch", None,
        ("decode",),
    ),
}  # fmt: skip


def tasks_of(host: Clock, tasks_ms: Mapping[str, float]) -> list[PipelineTask]:
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
