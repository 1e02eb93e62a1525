"""What step times that are always on add to a step of ten tasks.

Of a step of 1 ms, as a ratio; and of empty tasks, in microseconds, where the difference is not lost
in the noise of what the tasks do. The bars say the same: 2%, and 20 us.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median

from bench.measure import Row, compared, interleaved, tolerated
from bench.serial import busy
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.trace import StepTimes

TASKS = 10
BAR = 1.02
BAR_US = 20


def rows(rounds: int = 60, iterations: int = 200) -> list[Row]:
    """Two rows: of tasks of 100 us, and of empty ones."""
    with_it, without = times_us(busy, rounds, iterations)
    pairs = zip(*times_us(lambda ctx: None, rounds, iterations), strict=True)
    added = median(a - b for a, b in pairs)
    what = f"StepTimes on a step of {TASKS} tasks of 100 us"
    return [
        compared(what, with_it, without, "us", "without", BAR, digits=1),
        tolerated(f"StepTimes adds to a step of {TASKS} tasks", added, BAR_US, "us", digits=1),
    ]


def times_us(
    work: Callable[[IterContext], None], rounds: int, iterations: int
) -> list[list[float]]:
    """Steps with step times and without, in many short blocks.

    Reports, each a line of JSON, are as frequent as usual.
    """
    tasks = [PipelineTask(f"t{i}", work) for i in range(TASKS)]

    def us(observing: AbstractContextManager[None]) -> float:
        with observing:
            begin = time.perf_counter()
            for _ in pipe.iterate(range(iterations)):
                pass
            return (time.perf_counter() - begin) / iterations * 1e6

    with (
        tempfile.TemporaryDirectory() as folder,
        SWPipeline(PipelinePlan.serial(tasks), device="cpu", check_effects=False) as pipe,
    ):
        times = StepTimes(Path(folder) / "steps.jsonl")
        return interleaved(rounds, lambda: us(pipe.observe(times)), lambda: us(nullcontext()))
