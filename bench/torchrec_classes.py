"""swpipe's class of each of TorchRec's names compared with TorchRec's, on one rank and two.

Both train a model of their own on the same batches with one torch thread per rank, alternately: in
each trial each trains for some steps, in the steady state. Small steps show what a class costs the
host beyond TorchRec's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import swpipe
from bench.measure import Row, compared, interleaved, sharpen_timers

if TYPE_CHECKING:
    from bench.dlrm import Size

CLASSES: Mapping[str, Mapping[str, Any]] = {
    "TrainPipelineBase": {},
    "TrainPipelineSparseDist": {},
    "TrainPipelineFusedSparseDist": {},
    "TrainPipelineSemiSync": {"start_batch": 0},
    "PrefetchTrainPipelineSparseDist": {},
}
"""The arguments of each class in addition to model, optimizer and device."""

TINY_BARS: Mapping[int, float] = {1: 1.0, 2: 1.05}
"""The bars by the number of ranks."""

BENCH_BAR = 1.0
FRAMES_BAR = 120
SETTLE = 20
"""Steps before the first trial: ours watches its tasks in the first iterations."""


def rows(trials: int = 60, steps: int = 20) -> list[Row]:
    """Return a row per class, for each size and number of ranks."""
    if find_spec("torchrec") is None:
        return [Row("TorchRec's classes", "skipped: there is no torchrec")]
    from bench.dlrm import TINY, Size
    from tests.support.ranks import Ranks

    with Ranks(1) as group:
        (found,) = group.run(frames)
    counted = compared("frames of swpipe in a step", [found], [FRAMES_BAR], "", "", 1.0, digits=0)
    sizes = {"tiny": (TINY, trials, steps), "bench size": (Size(), trials // 3, steps // 4)}
    return [
        counted,
        *(
            row
            for what, plan in sizes.items()
            for ranks in TINY_BARS
            for row in _rows(what, ranks, *plan)
        ),
    ]


def _rows(what: str, ranks: int, size: Size, trials: int, steps: int) -> Iterator[Row]:
    from tests.support.ranks import Ranks

    bar = TINY_BARS[ranks] if what == "tiny" else BENCH_BAR
    with Ranks(ranks, deadline_s=1800.0) as group:
        for name in CLASSES:
            ours, theirs = group.run(duel, name, size, trials, steps)[0]
            where = f"{what}, {ranks} rank{'s' * (ranks > 1)}: {name}"
            yield compared(where, ours, theirs, "ms", "TorchRec", bar, digits=3)


def duel(name: str, size: Size, trials: int, steps: int) -> tuple[Sequence[float], Sequence[float]]:
    """Return the ms per step of ours and of TorchRec's in each trial."""
    from torchrec.distributed.train_pipeline import train_pipelines

    from bench.contenders import HostStream, streams_on_a_cpu
    from bench.dlrm import CPU, dense_optimizer, endless, sharded_dlrm
    from swpipe.tasks import torchrec

    sharpen_timers()
    ours, theirs = (
        getattr(module, name)(model, dense_optimizer(model), CPU, **CLASSES[name])
        for module in (torchrec, train_pipelines)
        for model in [sharded_dlrm(size)]
    )
    if name.startswith("Prefetch"):
        theirs._data_dist_stream = HostStream()  # with None, it prefetches nothing and fails
    with streams_on_a_cpu():
        turns = [partial(step_ms, pipeline, endless(size)) for pipeline in (ours, theirs)]
        for turn in turns:
            turn(SETTLE)
        ours_ms, theirs_ms = interleaved(trials, *(partial(turn, steps) for turn in turns))
    ours.close()
    return ours_ms, theirs_ms


def frames(steps: int = 10) -> float:
    """Return swpipe's function calls per step of ``TrainPipelineSparseDist``, once it is full."""
    from bench.dlrm import CPU, TINY, dense_optimizer, endless, sharded_dlrm
    from swpipe.tasks.torchrec import TrainPipelineSparseDist

    here = str(Path(swpipe.__file__).parent)
    model, data, count = sharded_dlrm(TINY), endless(TINY), 0
    pipeline: Any = TrainPipelineSparseDist(model, dense_optimizer(model), CPU)

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(here)

    for step in range(SETTLE + steps):
        if step == SETTLE:
            sys.setprofile(profile)
        pipeline.progress(data)
    sys.setprofile(None)
    pipeline.close()
    return count / steps


def step_ms(pipeline: Any, data: Iterator[Any], steps: int) -> float:
    """Return the time per step, in ms."""
    dist.barrier()
    begin_s = time.perf_counter()
    for _ in range(steps):
        pipeline.progress(data)
    return (time.perf_counter() - begin_s) / steps * 1e3
