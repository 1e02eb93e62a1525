"""What the plans of the workloads are predicted to hold, against what their runs hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swpipe.tasks.clicks.config import ClickConfig, ModelConfig
from swpipe.tasks.clicks.job import ClickJob
from swpipe.tasks.workload import Workload, workloads
from tests.support.memory_work import Peaks, peaks_of_job
from tests.support.ranks import Ranks
from tests.tasks.clicks.rows import write_log


def all_peaks(workload: Workload, job: Any) -> dict[str, Peaks]:
    """Peaks of the serial plan and of the usual one."""
    names = ("serial", workload.usual_plan)
    return {name: peaks_of_job(job, workload.plans[name](), 6) for name in names}


def far_off(found: dict[str, Peaks]) -> dict[str, Peaks]:
    """Those that are more than a tenth off."""
    return {n: p for n, p in found.items() if not 0.9 <= p.predicted / p.measured <= 1.1}


@pytest.fixture
def config(tmp_path: Path) -> ClickConfig:
    """Batches of 400 rows, the log five times over."""
    model = ModelConfig(buckets=512)
    return ClickConfig([write_log(tmp_path / "log.tsv", 2000)], [], batch_size=400, model=model)


def _sharded(config: ClickConfig) -> dict[str, Peaks]:
    from swpipe.tasks.clicks.sharded import ShardedClickJob

    on_ranks = workloads()["clicks"].on_ranks
    assert on_ranks is not None
    return all_peaks(on_ranks, ShardedClickJob(config))


def test_the_click_jobs_plans(one_rank: Ranks, config: ClickConfig) -> None:
    """Within a tenth, in one process and sharded; pipelined ones hold more."""
    for found in (
        all_peaks(workloads()["clicks"], ClickJob(config)),
        *one_rank.run(_sharded, config),
    ):
        assert far_off(found) == {}
        serial, pipelined = found.values()
        assert pipelined.measured > serial.measured


GPT = {
    "layers": 2, "hidden_size": 32, "heads": 2, "sequence_length": 32, "global_batch_size": 4,
    "microbatches": 2, "schedule": "ours",
}  # fmt: skip


def test_plans_of_other_workloads() -> None:
    """Within a tenth: gradients, several microbatches in one task, and images."""
    for name, options in (("images", {}), ("transformer", GPT)):
        workload = workloads()[name]
        job = workload.open_job(workload.configure({"seed": 0, "device": "cpu", **options}))
        assert far_off(all_peaks(workload, job)) == {}
