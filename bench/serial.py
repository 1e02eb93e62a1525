"""The cost that ``run_serial`` adds to a bare loop over the same functions of 100 us each.

A task polls the clock until 100 us have passed, so its length does not depend on the speed of the
machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bench.measure import Row, compared, interleaved
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline

TASK_S = 100e-6
TASKS = 5


def busy(ctx: IterContext) -> None:
    end = time.perf_counter() + TASK_S
    while time.perf_counter() < end:
        pass


def rows(rounds: int = 200, iterations: int = 20) -> list[Row]:
    """Return one row of many short rounds, so that drift of the machine affects both sides."""
    tasks = [PipelineTask(f"t{i}", busy) for i in range(TASKS)]
    fns = [task.fn for task in tasks]

    def bare() -> None:
        for i in range(iterations):
            ctx = IterContext(i, i)
            for fn in fns:
                fn(ctx)

    def us(run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) / iterations * 1e6

    with SWPipeline(PipelinePlan.serial(tasks), device="cpu") as pipe:
        ours, theirs = interleaved(
            rounds, lambda: us(lambda: pipe.run_serial(range(iterations))), lambda: us(bare)
        )
    what = f"run_serial, {TASKS} tasks of 100 us"
    return [compared(what, ours, theirs, "us/iteration", "bare loop", 1.02, digits=1)]
