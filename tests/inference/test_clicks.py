"""Inferred dependences of the click job, and its ready-made plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swpipe import PipelinePlan, SWPipeline
from swpipe.analysis.validation import validate
from swpipe.core.effects import conflicts
from swpipe.core.plan import OTHERS
from swpipe.core.resolved import resolve_plan
from swpipe.inference import Recording, record
from swpipe.inference.orders import Edge, Orders, edge_of
from tests.inference.helpers import WORD, orders, reads, writes
from tests.support.plans_for_tests import scattered
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


@pytest.mark.slow
def test_inferred_dependences_are_enough_on_any_stages_and_threads(
    recording: Recording, tmp_path: Path
) -> None:
    """Checked on random plans."""
    job = job_on(tmp_path)
    serially = results(job, job.plan("serial"))
    for seed in range(5):
        job = job_on(tmp_path)
        plan = scattered(recording.plan(), seed)
        assert all(map(torch.equal, serially, results(job, plan))), seed


def test_recording_trains_nothing(tmp_path: Path) -> None:
    """A job goes on as if it had not been; its running AUC replaces a tensor each time."""
    recorded = job_on(tmp_path)
    before = recorded.auc.counts
    recording_of(recorded)
    assert torch.equal(recorded.auc.counts, before)
    plan = recorded.plan("serial")
    assert all(map(torch.equal, results(recorded, plan), results(job_on(tmp_path), plan)))


def test_a_removed_dependence_is_reported_missing(recording: Recording) -> None:
    """Each inferred dependence, removed, is missing once its tasks are on different threads."""
    found = recording
    needed = found.dependences()
    of_tasks = {name: one for name, one in found.effects.items() if name not in OTHERS}
    schedule: dict[Any, Any] = {
        task.name: replace(PLANS["serial"]().schedule[task.name], thread_group=task.name)
        for task in found.tasks
    }
    whole = PipelinePlan(schedule, needed.deps, needed.cross_iter_deps, pipeline_depth=2)
    assert found.compare(whole).missing == ()
    for edge in needed.needed:
        plan = replace(
            whole,
            deps=[pair for pair in needed.deps if (*pair, 0) != edge[:3]],
            cross_iter_deps=[entry for entry in needed.cross_iter_deps if entry != edge[:3]],
        )
        lacking = found.compare(plan).missing
        assert edge[:3] in {one[:3] for one in lacking}
        declared = [Edge(*dep[:3]) for dep in resolve_plan(plan).dependences]
        mended = Orders(tuple(of_tasks), [*declared, *map(edge_of, lacking)])
        assert all(mended.implies(edge_of(conflict)) for conflict in conflicts(of_tasks))
