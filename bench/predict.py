"""The interval that ``simulate`` predicts from measured costs, beside the interval of the run.

For tasks that block for known times, with costs measured one task at a time, the prediction must be
within 5%. For real work, with costs measured while the plan runs, it must be within 15%: concurrent
tasks share cores and memory, and large arrays cost more to make in a worker thread. The prediction
from costs measured one by one is shown beside it, without a bar.

Each round measures the costs, then the run. The ratio is the greater over the smaller of the two:
1.05 is 5% off, in either direction.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.data_bound import PLAN, files, loop_tasks
from bench.interval import CASES, block, ms_per_period
from bench.measure import Row, Spread, interleaved, off_by
from bench.timed_device import TimedDevice
from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.core.costs import CostModel
from swpipe.planning import simulate
from swpipe.profiler import measure_costs

BLOCKING_BAR, REAL_BAR = 1.05, 1.15


@dataclass(frozen=True, slots=True)
class Work:
    """Something to predict.

    Attributes:
        what: What it is.
        plan: The plan.
        tasks: What it runs.
        batches: What the costs are measured on, and the run is fed with, over and over.
        bar: How far the prediction may be off, as a ratio; None where the row only informs.
        pipelined: Costs are measured while the plan runs, or else one task at a time.
        device: What it runs on.
    """

    what: str
    plan: PipelinePlan
    tasks: Sequence[PipelineTask]
    batches: Sequence[Any]
    bar: float | None
    pipelined: bool = False
    device: Any = "cpu"


def predicted_ms(pipe: SWPipeline, costs: CostModel) -> float:
    """The interval that the simulator predicts."""
    return simulate(pipe.plan, costs, streams=pipe.device.has_streams).ii_us / 1e3


def measured_ms(pipe: SWPipeline, batches: Sequence[Any], periods: int) -> float:
    """The interval of a run."""
    return ms_per_period(pipe, periods, lambda n: [batches[i % len(batches)] for i in range(n)])


def row(work: Work, rounds: int, periods: int) -> Row:
    """Prediction and run side by side."""
    with SWPipeline(work.plan, work.tasks, device=work.device) as pipe:

        def predict() -> float:
            return predicted_ms(pipe, measure_costs(pipe, work.batches, 2, 8, work.pipelined))

        def measure() -> float:
            return measured_ms(pipe, work.batches, periods)

        predicted, measured = interleaved(rounds, predict, measure)
    how = "costs under the plan" if work.pipelined else "costs one by one"
    return Row(
        what=f"predicted, {work.what}, {how}",
        ours=f"predicted {Spread.of(predicted).text()} ms",
        beside=f"run {Spread.of(measured).text()} ms",
        ratio=off_by(predicted, measured),
        bar=work.bar,
    )


# ------------------------------------------------------------------------------------- work


def blocking() -> Iterator[Work]:
    """Tasks that block for known times."""
    for case in CASES:
        yield Work(case.what, case.plan, case.tasks(), [None], BLOCKING_BAR)


STREAMING = PipelinePlan(
    {
        "copy": TaskSchedule(0, stream="memcpy"),
        "dist": TaskSchedule(1, stream="dist"),
        "forward": TaskSchedule(2),
        "step": TaskSchedule(2),
    },
    deps=[("dist", "copy"), ("forward", "dist"), ("step", "forward")],
    cross_iter_deps=[("forward", "step"), ("dist", "step", 2)],
    pipeline_depth=4,
)
STREAM_MS = {"copy": 5.0, "dist": 7.0, "forward": 4.0, "step": 5.0}


@contextlib.contextmanager
def streaming() -> Iterator[Work]:
    """Device work of known times that waits across three streams."""
    with TimedDevice() as device:

        def task(name: str, seconds: float) -> PipelineTask:
            return PipelineTask(name, lambda ctx: device.launch(lambda: block(seconds)))

        tasks = [task(name, ms * 1e-3) for name, ms in STREAM_MS.items()]
        yield Work("3 streams", STREAMING, tasks, [None], BLOCKING_BAR, device=device)


def _bar(*, pipelined: bool) -> float | None:
    return REAL_BAR if pipelined else None


def data_bound(folder: Path, *, pipelined: bool = False) -> Work:
    """A loop that waits for its data."""
    bar = _bar(pipelined=pipelined)
    return Work("a data-bound loop", PLAN, loop_tasks(), files(folder), bar, pipelined)


def clicks(folder: Path, *, pipelined: bool = False) -> Work:
    """The click job under its pipelined plan."""
    from swpipe.plans.clicks import PLANS
    from swpipe.tasks.clicks.config import ClickConfig
    from swpipe.tasks.clicks.generate import click_logs
    from swpipe.tasks.clicks.job import ClickJob

    logs = click_logs(folder, train_rows=8192, held_out_rows=1)
    job = ClickJob(ClickConfig(data=(logs.train,), batch_size=2048))
    batches = list(job.batches(4))
    plan = PLANS["pipelined"]()
    return Work("the click job", plan, job.tasks(), batches, _bar(pipelined=pipelined), pipelined)


@contextlib.contextmanager
def real() -> Iterator[list[Work]]:
    """Real workloads, with costs measured either way."""
    with tempfile.TemporaryDirectory() as folder:
        yield [
            make(Path(folder), pipelined=pipelined)
            for make in (data_bound, clicks)
            for pipelined in (True, False)
        ]


def rows(rounds: int = 7, periods: int = 40) -> list[Row]:
    """A row for each."""
    with real() as works, streaming() as streams:
        return [row(work, rounds, periods) for work in (*blocking(), streams, *works)]
