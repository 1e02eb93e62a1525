"""What running serially adds to a bare loop that calls the same functions: tasks of 100 us.

The tasks are busy until 100 us have passed, so that what a round takes beyond that is what
surrounds them, however fast the machine happens to run at the moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from tests.bench.measure import Row, compared, interleaved

TASK_S = 100e-6
TASKS = 5


def busy(ctx: IterContext) -> None:
    end = time.perf_counter() + TASK_S
    while time.perf_counter() < end:
        pass


def rows(rounds: int = 200, iterations: int = 20) -> list[Row]:
    """One row; many short rounds, so that a machine that drifts does so under both."""
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
