"""The click job trains on unchanged after each of its tasks, and each pair, was shortcut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, repeat
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swpipe import SWPipeline
from swpipe.plans.clicks import TASKS
from swpipe.profiler.trial_state import trial_state
from swpipe.tasks.clicks import ClickConfig, ClickJob, ModelConfig
from tests.tasks.clicks.rows import write_log

SMALL = ModelConfig(buckets=64, embedding_dim=4, bottom_layers=(8,), cross_rank=3, top_layers=(8,))


@pytest.fixture
def config(small_log: Path, tmp_path: Path) -> ClickConfig:
    """A small model on 50 rows, in batches of 8."""
    held_out = write_log(tmp_path / "held-out.tsv", 30, seed=1)
    return ClickConfig([small_log], [held_out], batch_size=8, model=SMALL)


def trained(config: ClickConfig, plan: str, names: Sequence[str] | None) -> list[Tensor]:
    """What is trained in four batches, in the middle of which tasks are shortcut."""
    job = ClickJob(config)
    batches = list(job.batches(4))
    with SWPipeline(job.plan(plan), job.tasks(), device="cpu") as pipe:
        pipe.run(iter(batches[:2]))
        if names is not None:
            with trial_state(pipe, batches[2], None).trial(), pipe.shortcut(*names):
                pipe.run(repeat(batches[2], 5))
        pipe.run(iter(batches[2:]))
    state = [value for each in job.optimizer.state.values() for value in each.values()]
    return [p.detach().clone() for p in job.model.parameters()] + state


def differing(config: ClickConfig, plan: str, shortcuts: Sequence[Sequence[str]]) -> list[str]:
    """The shortcuts after which training differs in any bit."""
    expected = trained(config, plan, None)
    return [
        "+".join(names)
        for names in shortcuts
        if not all(map(torch.equal, expected, trained(config, plan, names)))
    ]


@pytest.mark.parametrize("plan", ["serial", pytest.param("pipelined", marks=pytest.mark.slow)])
def test_each_task_alone(config: ClickConfig, plan: str) -> None:
    """Nothing outside the snapshot is trained meanwhile."""
    assert differing(config, plan, [(name,) for name in TASKS]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "first"), [("serial", 0), ("pipelined", 1)])
def test_each_pair(config: ClickConfig, plan: str, first: int) -> None:
    """All 36, each under one of the plans."""
    assert differing(config, plan, list(combinations(TASKS, 2))[first::2]) == []
