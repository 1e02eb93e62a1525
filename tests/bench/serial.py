"""What running serially adds to a bare loop that calls the same functions: tasks of 100 us.

The tasks are busy until 100 us have passed, so that what a round takes beyond that is what
surrounds them, however fast the machine happens to run at the moment.
"""

from __future__ import annotations

import time

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from tests.bench.measure import Row, Spread, interleaved, ratios

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

    def bare() -> float:
        begin = time.perf_counter()
        for i in range(iterations):
            ctx = IterContext(i, i)
            for fn in fns:
                fn(ctx)
        return (time.perf_counter() - begin) / iterations * 1e6

    with SWPipeline(PipelinePlan.serial(tasks), device="cpu") as pipe:

        def ours() -> float:
            begin = time.perf_counter()
            pipe.run_serial(range(iterations))
            return (time.perf_counter() - begin) / iterations * 1e6

        a, b = interleaved(rounds, ours, bare)
    return [
        Row(
            what=f"run_serial, {TASKS} tasks of 100 us",
            ours=f"{Spread.of(a).text(1)} us/iteration",
            beside=f"bare loop {Spread.of(b).text(1)} us/iteration",
            ratio=ratios(a, b),
            bar=1.02,
        )
    ]
