"""Inferred dependences of the click job, and its ready-made plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swpipe import PipelinePlan, SWPipeline
from swpipe.analysis.validation import validate
from swpipe.inference import Recording, record
from tests.inference.helpers import WORD, orders, reads, writes
from tests.tasks.clicks.rows import write_log

pytest.importorskip("torchrec")
pytest.importorskip("polars")

from swpipe.plans.clicks import PLANS
from swpipe.tasks.clicks import ClickConfig, ClickJob, ModelConfig

SMALL = ModelConfig(buckets=64, embedding_dim=4, bottom_layers=(8,), cross_rank=3, top_layers=(8,))


def job_on(path: Path) -> ClickJob:
    """A small model on 50 rows, in batches of 8; a new one starts from the same parameters."""
    log = path / "small.tsv"
    if not log.exists():
        write_log(log, 50)
    return ClickJob(ClickConfig([log], [], batch_size=8, model=SMALL, device="cpu"))


def recording_of(job: ClickJob) -> Recording:
    """Two iterations on its first batch."""
    return record(job.tasks(), next(job.batches()), device="cpu")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Of a job of its own."""
    return recording_of(job_on(tmp_path_factory.mktemp("job")))


def results(job: ClickJob, plan: PipelinePlan) -> list[torch.Tensor]:
    """Losses of one epoch, and the parameters after it."""
    with SWPipeline(plan, job.tasks(), device="cpu") as pipe, pipe.borrow():  # without a body
        losses = [ctx.loss.detach() for ctx in pipe.iterate(job.batches())]
    return [*losses, *(parameter.detach() for parameter in job.model.parameters())]


def test_a_training_step_is_inferred_without_declarations(tmp_path: Path) -> None:
    """Accesses to model, gradients, optimizer and running metrics."""
    job = job_on(tmp_path)
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


@pytest.mark.parametrize("name", PLANS)
def test_no_dependence_is_missing_in_the_ready_made_plans(recording: Recording, name: str) -> None:
    """Every conflict is ordered."""
    assert recording.compare(PLANS[name]()).missing == ()


def test_inferred_dependences_make_a_plan_with_the_same_numbers(
    recording: Recording, tmp_path: Path
) -> None:
    """Two stages and two threads with inferred dependences give the serial run's losses."""
    job = job_on(tmp_path)
    inferred = recording.plan()
    piped = replace(inferred, schedule=job.plan("pipelined").schedule, pipeline_depth=3)
    validate(piped, job.tasks())
    serially = results(job_on(tmp_path), job.plan("serial"))
    assert all(map(torch.equal, serially, results(job, piped)))
