"""The time of the published V generator, and of torch's class for a V of the same size."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from contextlib import redirect_stdout

from bench.measure import Row, Spread, interleaved, ratios
from swpipe.plans.pipeline_parallel import PipelineGraph, activation_memory, torch_schedule

BAR_S = 1.0
"""The bar for the process time with 32 ranks and 128 microbatches."""


def process_s(run: Callable[[], object]) -> float:
    """Return the process time of one run, whose output is discarded."""
    with redirect_stdout(io.StringIO()):
        begin = time.process_time()
        run()
        return time.process_time() - begin


def rows(rounds: int = 5, n: int = 32, m: int = 128) -> list[Row]:
    """Time the generator, which tries four ways to fill waits twice each; torch has one order."""
    graph = PipelineGraph(n, m, 1000, 1000, 1000, 1, *activation_memory(4096, 32, 4096))
    torch_schedule("zbv", 2, 2)  # its import is not measured
    ours, torch = interleaved(
        rounds,
        lambda: process_s(graph.get_v_schedule),
        lambda: process_s(lambda: torch_schedule("zbv", n, m)),
    )
    what = f"published V generator, {n} ranks, {m} microbatches"
    spread = f"{Spread.of(ours).text()} s"
    return [
        Row(what, spread, f"bar {BAR_S:g} s", Spread.of(s / BAR_S for s in ours), 1.0),
        Row(what, spread, f"torch's ZBV {Spread.of(torch).text()} s", ratios(ours, torch)),
    ]
