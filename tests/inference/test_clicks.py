"""Inferred dependences of the click job, and its ready-made plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swpipe.inference import record
from tests.inference.helpers import WORD, orders, reads, writes
from tests.tasks.clicks.rows import write_log

pytest.importorskip("torchrec")
pytest.importorskip("polars")

from swpipe.plans.clicks import PLANS
from swpipe.tasks.clicks import ClickConfig, ClickJob, ModelConfig

SMALL = ModelConfig(buckets=64, embedding_dim=4, bottom_layers=(8,), cross_rank=3, top_layers=(8,))


def test_a_training_step_is_inferred_without_declarations(tmp_path: Path) -> None:
    """Accesses to model, gradients, optimizer and running metrics; no ready-made plan lacks any."""
    log = tmp_path / "small.tsv"
    write_log(log, 50)
    job = ClickJob(ClickConfig([log], [], batch_size=8, model=SMALL, device="cpu"))
    tasks = [replace(task, io=[WORD], pure=False) for task in job.tasks()]
    state = {"model": job.model, "optimizer": job.optimizer, "auc": job.auc}
    found = record(tasks, next(job.batches()), device="cpu", state=state)
    assert reads(found, "embed") == {"ctx.inputs", "model parameters"}
    assert writes(found, "backward") == {"model gradients"}
    assert writes(found, "step") >= {"model parameters", "optimizer state"}
    assert writes(found, "auc") == {"auc.counts"}
    assert orders(found) == {
        ("decode", "read", 0),
        ("hash", "decode", 0),
        ("copy", "hash", 0),
        ("embed", "copy", 0),
        ("forward", "embed", 0),
        ("backward", "forward", 0),
        ("step", "backward", 0),
        ("auc", "forward", 0),
        ("embed", "step", 1),
    }
    for make in PLANS.values():
        assert found.compare(make()).missing == ()
