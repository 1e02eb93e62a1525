"""What the plans of the workloads are predicted to hold, against what their runs hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from docs.examples.moe_gpt import GPTModel, TransformerConfig, mean_loss
from swpipe.core.task import PipelineTask
from swpipe.plans.pipeline_parallel.pipeline_training import PLANS
from swpipe.tasks.clicks.config import ClickConfig, ModelConfig
from swpipe.tasks.clicks.job import ClickJob
from swpipe.tasks.pipeline_parallel import PipelineTrainTasks, SerialRuntime
from swpipe.tasks.workload import Job, Workload, workloads
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


class Microbatches(Job):
    """A step of several microbatches in one task, which makes gradients."""

    def __init__(self) -> None:
        model = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=101,
            max_sequence_length=32,
        )  # fmt: skip
        self.runtime = SerialRuntime([GPTModel(model)], 2, mean_loss)
        self.modules = self.runtime.modules
        self.optimizer = torch.optim.AdamW(self.modules[0].parameters())

    def tasks(self) -> tuple[PipelineTask, ...]:
        return PipelineTrainTasks(self.runtime, self.optimizer, self.load).tasks()

    def load(self, number: int) -> tuple[tuple[Tensor, ...], Tensor]:
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(101, (4, 33), generator=draw)
        return (tokens[:, :-1],), tokens[:, 1:]

    def batches(self, steps: int | None = None, /) -> Iterator[int]:
        return iter(range(steps or 1))


def test_plans_of_other_workloads() -> None:
    """Within a tenth: gradients, several microbatches in one task, and images."""
    images = workloads()["images"]
    job = images.open_job(images.configure({"seed": 0, "device": "cpu"}))
    assert far_off(all_peaks(images, job)) == {}
    found = {name: peaks_of_job(Microbatches(), PLANS[name](), 6) for name in ("serial", "ahead")}
    assert far_off(found) == {}
