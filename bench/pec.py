"""PEC compared with the split plan on two ranks, on links limited by bandwidth and by latency.

Sleeps stand for the work of a device, half of it in each direction. Both plans train the same model
on the same batches alternately, and must end with equal parameters, bit for bit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from bench.measure import Row, compared, sharpen_timers

WORK_S = 0.1
ROWS, DIM, BATCH, IDS = 60_000, 32, 128, 4
BAR, TRIALS_BAR = 0.90, 1.03

FILL = 6
"""Steps before each turn's clock starts: a pipeline fills, and the previous turn's exchanges end.
"""


class Link(NamedTuple):
    """A link, and the share of ids that a batch has in common with the previous one."""

    latency_ms: float
    bytes_per_s: float
    shared: float
    bar: float | None = None

    def __str__(self) -> str:
        speed = f"{self.bytes_per_s / 1e6:g} MB/s" if self.bytes_per_s < 1e12 else "any bandwidth"
        return f"L = {self.latency_ms:g} ms, {speed}, {self.shared:.0%} of the ids shared"


LINKS = (Link(5, 1e12, 0.2), Link(20, 1e12, 0.2), Link(20, 1.1e6, 0.2, BAR), Link(20, 1.1e6, 0.5))


class Turns(NamedTuple):
    """The results on one link: ms per step of each plan by round, the chosen plan, and sizes."""

    ms: dict[str, list[float]]
    equal: bool
    chosen: str
    sizes: str


def rows(rounds: int = 5, steps: int = 8) -> list[Row]:
    """Return, for each link, PEC over the split plan, and the plan that a pipeline chooses."""
    if find_spec("torchrec.distributed.pec_embedding") is None:
        return [Row("PEC on two ranks", "skipped: there is no torchrec with its collections")]
    from bench.contest import on_ranks

    table = []
    for link in LINKS:
        found: Turns = on_ranks(turns, link, rounds, steps)[0]
        if not found.equal:
            raise ValueError(f"{link}: PEC has not the numbers of the split plan")
        pec, split = found.ms["pec"], found.ms["split"]
        table.append(compared(f"PEC, {link}", pec, split, "ms", "split", link.bar, digits=1))
        table.append(Row(f"the same: chosen is {found.chosen}", found.sizes))
        table.append(
            compared("the same: the chosen plan", found.ms[found.chosen], split, "ms", "split",
                     TRIALS_BAR, digits=1)
        )  # fmt: skip
    return table


def turns(link: Link, rounds: int, steps: int) -> Turns:
    """Time both plans alternately, and let a pipeline choose."""
    import torch

    from bench.emulated_link import EmulatedLink
    from swpipe.tasks.torchrec import TrainPipelinePEC
    from tests.support.pec_models import everything

    sharpen_timers()
    made = {"split": partial(_pipeline, 10**9), "pec": partial(_pipeline, 0)}
    with EmulatedLink(link.latency_ms, link.bytes_per_s):
        count = rounds * (steps + FILL)
        runners = {name: make(link, count) for name, make in made.items()}
        ms: dict[str, list[float]] = {name: [] for name in runners}
        for turn in range(rounds):
            for name in sorted(runners, reverse=turn % 2 == 1):
                ms[name].append(_step_ms(*runners[name][1:], steps))
        states = []
        for model, pipeline, data in runners.values():
            with suppress(StopIteration):
                while True:
                    pipeline.progress(data)
            states.append(everything(model))
            pipeline.close()
        equal = all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        _, pipeline, data = _pipeline(None, link, 10**9)
        for _ in range(2 * TrainPipelinePEC.trial_batches + 1):
            pipeline.progress(data)
        report = pipeline.exchange_report
        pipeline.close()
    return Turns(ms, equal, str(report.chosen), str(report))


def _step_ms(pipeline: Any, data: Iterator[Any], steps: int) -> float:
    """Return the time of a step while the pipeline is full, in ms."""
    for _ in range(FILL):
        pipeline.progress(data)
    begin = time.perf_counter()
    for _ in range(steps):
        pipeline.progress(data)
    return (time.perf_counter() - begin) / steps * 1e3


def _pipeline(trial: int | None, link: Link, count: int) -> tuple[Any, Any, Iterator[Any]]:
    """Return a model, a pipeline that tries plans for ``trial`` batches, and its data."""
    from swpipe.tasks.torchrec import TrainPipelinePEC
    from tests.support.pec_models import CPU, batches, dense_optimizer, sharded

    class Pipeline(TrainPipelinePEC[Any, Any]):
        trial_batches = TrainPipelinePEC.trial_batches if trial is None else trial

    model = sharded(ROWS, DIM, work=_sleep)
    every = itertools.cycle(batches(8, ROWS, BATCH, IDS, link.shared))
    data = itertools.islice(every, count + 2 * FILL)
    return model, Pipeline(model, dense_optimizer(model), CPU), data


_sleep: Callable[[], None] = partial(time.sleep, WORK_S / 2)
