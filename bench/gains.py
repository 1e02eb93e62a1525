"""What a plan gains on whole models: steps per second beside the same tasks in a plain loop.

Each model is trained under both plans, in turns that alternate. No bar: how much there is to gain
depends on how much of a step is not training.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.measure import Row, compared, interleaved
from swpipe.tasks.job_run import JobRun, alternate
from swpipe.tasks.workload import workloads

MODELS = {
    "images": "image model: decode and augment ahead",
    "clicks": "click model: read, decode, hash ahead",
}
NEEDS = {"clicks": ("polars", "torchmetrics", "torchrec", "fbgemm_gpu")}
STEPS, TURN = 240, 40


def rows(steps: int = STEPS, turn: int = TURN) -> list[Row]:
    """A row per model."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as cache:
        there = [name for name in MODELS if all(map(find_spec, NEEDS.get(name, ())))]
        found = [one_model(name, steps, turn, Path(cache)) for name in there]
        if "clicks" in there:
            found.append(_on_two_ranks(steps, Path(cache)))
    torch.set_num_threads(threads)
    return found


def one_model(name: str, steps: int, turn: int, cache: Path) -> Row:
    """One model under both plans; ``cache`` keeps its data."""
    work = workloads()[name]
    given = {option.name: option.default for option in work.options}
    config = work.configure({**given, "device": "cpu", "cache_dir": cache})
    runs = [
        JobRun(plan, work.open_job(config), work.plans[plan](), steps, config.device)
        for plan in ("serial", work.usual_plan)
    ]
    with runs[0], runs[1]:
        alternate(runs, turn, chunk=turn)
        found = interleaved(steps // turn - 1, *(partial(_turn_ms, run, turn) for run in runs))
    return compared(MODELS[name], found[1], found[0], "ms", "plain loop")


def _turn_ms(run: Any, turn: int) -> float:
    begin = time.perf_counter()
    run.advance(turn)
    return (time.perf_counter() - begin) / turn * 1e3


def _on_two_ranks(steps: int, cache: Path) -> Row:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "swpipe", "train", "--compare", "serial,sparse_dist", "--steps", str(steps)]
    command += ["--cache-dir", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    per_s = dict(re.findall(r"^(serial|sparse_dist) +\d+ +([\d.]+)", done.stdout, re.MULTILINE))
    ours_ms, serial_ms = (1e3 / float(per_s[plan]) for plan in ("sparse_dist", "serial"))
    return compared("DLRM, two ranks: exchanges ahead", [ours_ms], [serial_ms], "ms", "plain loop")
