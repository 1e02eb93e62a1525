"""What a plan gains on whole models: steps per second beside the same tasks in a plain loop.

Each model is trained under both plans, in turns that alternate. No bar: how much there is to gain
depends on how much of a step is not training.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from bench.measure import Row, compared, interleaved
from swpipe import PipelineTask
from swpipe.tasks.images.images_workload import IMAGES
from swpipe.tasks.job_run import JobRun, alternate
from swpipe.tasks.workload import Job, Plans
from tests.support.click_example import HAS_POLARS, example

MODELS = {
    "images": "image model: decode and augment ahead",
    "clicks": "click model: read, decode, hash ahead",
}
STEPS, TURN = 240, 40


def rows(steps: int = STEPS, turn: int = TURN) -> list[Row]:
    """A row per model."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as cache:
        there = [name for name in MODELS if name != "clicks" or HAS_POLARS]
        rows = [one_model(name, steps, turn, Path(cache)) for name in there]
    torch.set_num_threads(threads)
    return rows


def one_model(name: str, steps: int, turn: int, cache: Path) -> Row:
    """One model under both plans; ``cache`` keeps its data."""
    make, plans = opened(name, cache)
    runs = [JobRun(plan, make(), plans[plan](), steps) for plan in ("serial", "pipelined")]
    with runs[0], runs[1]:
        alternate(runs, turn, chunk=turn)
        found = interleaved(steps // turn - 1, *(partial(_turn_ms, run, turn) for run in runs))
    return compared(MODELS[name], found[1], found[0], "ms", "plain loop")


class _ClickJob(Job):
    """The click model of the examples as a job: its log over and over."""

    device = "cpu"

    def __init__(self, cache: Path) -> None:
        self._job = example("click_job").ClickJob()
        self._log = example("click_log").batches_of(example("click_job").log_in(cache), 2048)

    def tasks(self) -> list[PipelineTask]:
        tasks: list[PipelineTask] = self._job.tasks()
        return tasks

    def batches(self, steps: int | None = None, /) -> Iterator[Any]:
        return islice(cycle(self._log), steps)


def opened(name: str, cache: Path) -> tuple[Callable[[], Job], Plans]:
    """Return a function that makes the job of a model, and its plans."""
    torch.set_num_threads(1)
    if name == "clicks":
        return partial(_ClickJob, cache), example("click_job").PLANS
    return partial(IMAGES.open_job, "cpu"), IMAGES.plans


def _turn_ms(run: Any, turn: int) -> float:
    begin = time.perf_counter()
    run.advance(turn)
    return (time.perf_counter() - begin) / turn * 1e3
