"""The steady state's initiation interval over its lower bound, for tasks that block a known time.

The bound is that of ``lower_bounds``, from what the same tasks take when a bare loop calls them in
the same round: the times they are given, and what the machine adds to a thread that blocks alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.measure import Row, compared, interleaved
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import lower_bounds

BAR = 1.03
YIELDING_S = 0.4e-3
"""Poll for this long at the end: a sleep ends 50 to 150 us late on a virtual machine."""


def block(seconds: float) -> None:
    """Block the calling thread for ``seconds``, and let others run meanwhile."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - YIELDING_S))
    while time.perf_counter() < end:
        time.sleep(0)


@dataclass(frozen=True, slots=True)
class Case:
    """A plan whose tasks block.

    Attributes:
        what: What is special about it.
        ms: Task to how long it blocks, in ms.
        plan: The plan.
    """

    what: str
    ms: dict[str, float]
    plan: PipelinePlan

    def tasks(self) -> list[PipelineTask]:
        """The tasks; each blocks as long as it should."""
        return [PipelineTask(name, _blocking(ms * 1e-3)) for name, ms in self.ms.items()]


def _blocking(seconds: float) -> Callable[[IterContext], None]:
    def fn(ctx: IterContext) -> None:
        block(seconds)

    return fn


def case(
    what: str,
    groups: Sequence[tuple[str, dict[str, float]]],
    depth: int,
    cross: Iterable[tuple[str, str, int]],
) -> Case:
    """A chain of tasks; each entry of ``groups`` is a stage, and names its thread group."""
    ms = {name: length for _, tasks in groups for name, length in tasks.items()}
    return Case(
        what,
        ms,
        PipelinePlan(
            schedule={
                name: TaskSchedule(stage, thread_group=group)
                for stage, (group, tasks) in enumerate(groups)
                for name in tasks
            },
            deps=[(consumer, producer) for producer, consumer in pairwise(ms)],
            cross_iter_deps=cross,
            pipeline_depth=depth,
        ),
    )


TRAINED = [("forward", "step", 1)]

CASES = (
    case(
        "3 groups, the caller's busiest",
        [
            ("read", {"read": 10}),
            ("io", {"copy": 3, "dist": 6}),
            ("default", {"forward": 5, "backward": 7, "step": 2}),
        ],
        depth=5,
        cross=TRAINED,
    ),
    case(
        "3 groups, a worker's busiest",
        [
            ("read", {"read": 10, "decode": 4}),
            ("io", {"copy": 2, "dist": 3}),
            ("default", {"forward": 3, "backward": 4, "step": 2}),
        ],
        depth=5,
        cross=TRAINED,
    ),
    case(
        "4 groups, all equally busy",
        [
            ("read", {"read": 9, "decode": 3}),
            ("io", {"pin": 2, "copy": 10}),
            ("net", {"dist": 7, "prefetch": 5}),
            ("default", {"forward": 4, "backward": 6, "step": 2}),
        ],
        depth=6,
        cross=TRAINED,
    ),
    case(
        "4 groups, a cycle through three",
        [
            ("read", {"read": 4}),
            ("cache", {"prefetch": 10}),
            ("compute", {"forward": 10}),
            ("default", {"step": 8}),
        ],
        depth=6,
        cross=[("prefetch", "step", 2)],
    ),
)


def bound_ms(plan: PipelinePlan, ms: Mapping[str, float]) -> float:
    """max(ResMII, RecMII): the busiest thread group, or the heaviest cycle per distance, in ms."""
    costs = CostModel({name: TaskCost(host_us=1e3 * length) for name, length in ms.items()})
    return lower_bounds(plan, costs, streams=False).ii_us / 1e3


def ms_per_period(
    pipe: SWPipeline, periods: int, batches: Callable[[int], Iterable[int]] = range
) -> float:
    """The steady state's interval, in ms; ``batches`` makes that many."""
    settle = 2 * pipe.plan.depth
    data = iter(batches(periods + settle + pipe.plan.depth))
    for _ in range(settle):
        pipe.progress(data)
    begin = time.perf_counter()
    for _ in range(periods):
        pipe.progress(data)
    seconds = time.perf_counter() - begin
    with contextlib.suppress(StopIteration):
        while True:
            pipe.progress(data)
    return seconds / periods * 1e3


def alone_ms(fn: Callable[[IterContext], None], repeats: int) -> float:
    """What a task takes when nothing runs beside it, in ms."""
    ctx = IterContext(None, 0)
    begin = time.perf_counter()
    for _ in range(repeats):
        fn(ctx)
    return (time.perf_counter() - begin) / repeats * 1e3


def row(case: Case, rounds: int, periods: int) -> Row:
    """One plan's interval beside its bound."""
    tasks = case.tasks()

    def bound() -> float:
        return bound_ms(case.plan, {task.name: alone_ms(task.fn, periods // 5) for task in tasks})

    with SWPipeline(case.plan, tasks, device="cpu") as pipe:
        ours, bounds = interleaved(rounds, lambda: ms_per_period(pipe, periods), bound)
    return compared(f"interval, {case.what}", ours, bounds, "ms", "bound", BAR)


def rows(rounds: int = 7, periods: int = 30) -> list[Row]:
    """A row per plan."""
    return [row(case, rounds, periods) for case in CASES]
