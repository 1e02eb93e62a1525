"""The initiation interval of the steady state over its lower bound and over its prediction.

The bound is that of ``lower_bounds`` for tasks that block for a set time. Their costs are what the
same tasks take in a bare loop in the same round, which includes what the machine adds to a thread
that blocks alone.

The prediction is that of ``simulate``, from costs measured in the same round. It must be within 5%
for these tasks, whose costs are measured one task at a time, and within 15% for a loop over
compressed files, whose costs are measured while the plan runs, since its tasks share cores and
memory. The ratio is the larger over the smaller: 1.05 is 5% off, in either direction.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

from bench.data_bound import PLAN, files, loop_tasks
from bench.measure import Row, Spread, compared, interleaved, off_by
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import lower_bounds, simulate
from swpipe.profiler import measure_costs

BAR = 1.03
BLOCKING_BAR, REAL_BAR = 1.05, 1.15
"""The bars of predictions."""

YIELDING_S = 0.4e-3
"""The time to poll at the end: a sleep ends 50 to 150 us late on a virtual machine."""


def block(seconds: float) -> None:
    """Block the calling thread for ``seconds``, and yield to other threads."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - YIELDING_S))
    while time.perf_counter() < end:
        time.sleep(0)


@dataclass(frozen=True, slots=True)
class Case:
    """A plan whose tasks block.

    Attributes:
        what: Its special property.
        ms: Task to how long it blocks, in ms.
        plan: The plan.
    """

    what: str
    ms: dict[str, float]
    plan: PipelinePlan

    def tasks(self) -> list[PipelineTask]:
        """Return the tasks, each of which blocks for its set time."""
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
    """Return a chain of tasks; each entry of ``groups`` is a stage with its thread group."""
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


CASES = (
    case(
        "3 groups, the caller's busiest",
        [
            ("read", {"read": 10}),
            ("io", {"copy": 3, "dist": 6}),
            ("default", {"forward": 5, "backward": 7, "step": 2}),
        ],
        depth=5,
        cross=[("forward", "step", 1)],
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
    """Return the lower bound on the interval, max(ResMII, RecMII), in ms."""
    costs = CostModel({name: TaskCost(host_us=1e3 * length) for name, length in ms.items()})
    return lower_bounds(plan, costs, streams=False).ii_us / 1e3


def ms_per_period(
    pipe: SWPipeline, periods: int, batches: Callable[[int], Iterable[int]] = range
) -> float:
    """Return the steady-state interval in ms; ``batches`` makes so many batches."""
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
    """Return the time of a task while nothing else runs, in ms."""
    ctx = IterContext(None, 0)
    begin = time.perf_counter()
    for _ in range(repeats):
        fn(ctx)
    return (time.perf_counter() - begin) / repeats * 1e3


def row(case: Case, rounds: int, periods: int) -> Row:
    """Compare one plan's interval with its bound."""
    tasks = case.tasks()

    def bound() -> float:
        return bound_ms(case.plan, {task.name: alone_ms(task.fn, periods // 5) for task in tasks})

    with SWPipeline(case.plan, tasks, device="cpu") as pipe:
        ours, bounds = interleaved(rounds, lambda: ms_per_period(pipe, periods), bound)
    return compared(f"interval, {case.what}", ours, bounds, "ms", "bound", BAR)


def predicted_row(
    what: str,
    plan: PipelinePlan,
    tasks: Sequence[PipelineTask],
    batches: Sequence[Any],
    rounds: int,
    periods: int,
) -> Row:
    """Compare the predicted interval with the measured one, for tasks over ``batches``."""
    pipelined = batches != [None]

    def fed(count: int) -> Iterable[Any]:
        return islice(cycle(batches), count)

    with SWPipeline(plan, tasks, device="cpu") as pipe:

        def predict() -> float:
            costs = measure_costs(pipe, batches, 2, 8, pipelined)
            return simulate(plan, costs, streams=False).ii_us / 1e3

        predicted, run = interleaved(rounds, predict, lambda: ms_per_period(pipe, periods, fed))
    return Row(
        f"predicted, {what}, costs {'under the plan' if pipelined else 'one by one'}",
        f"predicted {Spread.of(predicted).text()} ms",
        f"run {Spread.of(run).text()} ms",
        off_by(predicted, run),
        REAL_BAR if pipelined else BLOCKING_BAR,
    )


def rows(rounds: int = 7, periods: int = 30) -> list[Row]:
    """Return two rows per plan, and one of real work."""
    found = []
    for case in CASES:
        found.append(row(case, rounds, periods))
        found.append(predicted_row(case.what, case.plan, case.tasks(), [None], rounds, periods))
    with tempfile.TemporaryDirectory() as folder:
        batches = files(Path(folder))
        what = "a data-bound loop"
        found.append(predicted_row(what, PLAN, loop_tasks(), batches, rounds, periods))
    return found
