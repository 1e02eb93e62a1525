"""The plan of the design's example, random plans, and tasks that record their runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from swpipe import DeclaredIO, IterContext, PipelinePlan, PipelineTask, StreamSpec, TaskSchedule
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.last_readers import Uses, releases_of
from swpipe.core.effects import DRAWS

NAMES = ("h2d", "dist", "forward", "backward", "step")


NOBODY_ELSE = DeclaredIO(state=DRAWS.name, mode="r", others="")
"""Facts of a random task: neither the loop's body nor another task draws from torch's generators.
"""


def piped(depth: int | None = 3) -> PipelinePlan:
    """Return a plan of three stages on two thread groups."""
    return PipelinePlan(
        schedule={
            "h2d": TaskSchedule(stage=0, stream="memcpy", thread_group="io"),
            "dist": TaskSchedule(stage=1, stream="dist", thread_group="io", globally_ordered=True),
            "forward": TaskSchedule(stage=2),
            "backward": TaskSchedule(stage=2, globally_ordered=True),
            "step": TaskSchedule(stage=2),
        },
        deps=[("dist", "h2d"), ("forward", "dist"), ("backward", "forward"), ("step", "backward")],
        cross_iter_deps=[("forward", "step")],
        streams={"memcpy": StreamSpec(priority=-1)},
        pipeline_depth=depth,
    )


def spread(groups: Iterable[str] = ("io", "dist", "default", "default", "late")) -> PipelinePlan:
    """Return a plan of the same tasks as a chain over four stages, on the given thread groups."""
    stages = (0, 1, 2, 2, 3)
    return PipelinePlan(
        schedule={
            name: TaskSchedule(stage=stage, thread_group=group)
            for name, stage, group in zip(NAMES, stages, groups, strict=True)
        },
        deps=list(zip(NAMES[1:], NAMES[:-1], strict=True)),
    )


def going(before: HappensBefore, uses: Uses, keep: Sequence[str]) -> dict[str, str]:
    """Return, for each attribute that is not kept, the task at which it is deleted."""
    found = releases_of(before, uses, keep).at
    return {name: task for task, each in found.items() for one in each for name in one.names}


def task(name: str, fn: Callable[[IterContext], Any] | None = None, **options: Any) -> PipelineTask:
    """Return a task that calls ``fn``, if given, and sets its own attribute to the batch."""

    def run(ctx: IterContext) -> None:
        if fn is not None:
            fn(ctx)
        setattr(ctx, name, ctx.batch)

    return PipelineTask(name, run, **options)


def tasks(**fns: Callable[[IterContext], Any]) -> list[PipelineTask]:
    """Return the five tasks, which first call the functions given for them."""
    return [task(name, fns.get(name)) for name in NAMES]


def scattered(plan: PipelinePlan, seed: int) -> PipelinePlan:
    """Return the plan with random stages and threads."""
    rng = random.Random(seed)
    stage = {name: rng.randint(0, 3) for name in plan.schedule}
    edges = [*((c, p, 0) for c, p in plan.deps), *plan.cross_iter_deps]
    for _ in stage:  # as often as the longest chain needs
        for consumer, producer, distance in edges:
            stage[consumer] = max(stage[consumer], stage[producer] - distance)
    schedule = {
        name: replace(entry, stage=stage[name], thread_group=rng.choice(("default", "a", "b")))
        for name, entry in plan.schedule.items()
    }
    return replace(plan, schedule=schedule)
