"""The gain of a plan on whole models: steps per second, compared with a plain loop of the tasks.

Each model is trained under both plans in alternation. There is no bar, since the possible gain
depends on the share of a step that is not training.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.measure import Row, compared, interleaved
from swpipe import PipelinePlan
from swpipe.cli.runs import JobRun
from swpipe.cli.user_inputs import Job
from tests.support.click_example import HAS_POLARS, example

MODELS = {
    "images": "image model: decode and augment ahead",
    "clicks": "click model: read, decode, hash ahead",
}
STEPS, TURN = 240, 40


def rows(steps: int = STEPS, turn: int = TURN) -> list[Row]:
    """Return a row per model."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as cache:
        there = [name for name in MODELS if name != "clicks" or HAS_POLARS]
        rows = [one_model(name, steps, turn, Path(cache)) for name in there]
    torch.set_num_threads(threads)
    return rows


def one_model(name: str, steps: int, turn: int, cache: Path) -> Row:
    """Compare both plans of one model; ``cache`` is the folder of its data."""
    plans = plans_of(name)
    runs = [JobRun(plan, opened(name, cache), plans[plan], steps) for plan in plans]
    with runs[0].pipe, runs[1].pipe:
        for run in runs:
            run.advance(turn, timed=False)
        found = interleaved(steps // turn - 1, *(partial(_turn_ms, run, turn) for run in runs))
    return compared(MODELS[name], found[1], found[0], "ms", "plain loop")


def plans_of(name: str) -> dict[str, PipelinePlan]:
    """Return the serial plan and the pipelined plan of a model."""
    if name == "clicks":
        return {plan: make() for plan, make in example("click_job").PLANS.items()}
    job = Job(name, "cpu")
    return {"serial": PipelinePlan.serial(job.tasks), "pipelined": job.prefetching_plan()}


def opened(name: str, cache: Path) -> Job:
    """Return the job of a model, on one thread."""
    torch.set_num_threads(1)
    if name == "images":
        return Job(name, "cpu")
    example("click_job")  # from now on it can be imported by name
    with chdir(cache):
        return Job("click_job:loop", "cpu")


def _turn_ms(run: Any, turn: int) -> float:
    begin = time.perf_counter()
    run.advance(turn)
    return (time.perf_counter() - begin) / turn * 1e3
