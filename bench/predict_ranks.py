"""The interval that ``simulate`` predicts for the two-rank DLRM, beside that of the run.

As ``bench.predict``: costs taken under the plan must tell the interval within 15%. On a slow
link a task's time has waits in it which another plan would hide, so costs taken under a plan hold
for that plan.
"""

from __future__ import annotations

from importlib.util import find_spec

from bench import predict
from bench.measure import Row

PLANS = ("sparse_dist", "split")
LATENCIES = (0.0, 5.0)
"""Milliseconds."""


def on_rank(rounds: int, periods: int) -> list[Row]:
    """A row for each plan and link; on each rank."""
    from bench.dlrm import CPU, Size, batches, dense_optimizer, sharded_dlrm
    from bench.emulated_link import EmulatedLink
    from bench.measure import sharpen_timers
    from swpipe.plans.torchrec import sparse_dist as plans
    from swpipe.tasks.torchrec import SparseDistTasks, TrainStep

    sharpen_timers()
    found = []
    data = batches(Size(), 2)
    with EmulatedLink() as link:
        for name in PLANS:
            for latency in LATENCIES:
                link.latency_ms = latency
                model = sharded_dlrm(Size())
                tasks = SparseDistTasks(model, TrainStep([dense_optimizer(model)]), device=CPU)
                plan = plans.split(after_step=False) if name == "split" else plans.sparse_dist()
                what = f"two-rank DLRM, {name}, L = {latency:g} ms"
                bar = predict.REAL_BAR
                work = predict.Work(what, plan, tasks.tasks(), data, bar, pipelined=True)
                found.append(predict.row(work, rounds, periods))
    return found


def rows(rounds: int = 5, periods: int = 30) -> list[Row]:
    """The rows of rank 0."""
    if find_spec("torchrec") is None:
        return [Row("predicted, two-rank DLRM", "skipped: there is no torchrec")]
    from bench.contest import on_ranks

    found: list[Row] = on_ranks(on_rank, rounds, periods)[0]
    return found
