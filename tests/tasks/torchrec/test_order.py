"""Collectives keep one order on all ranks, whatever threads issue them and however late."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.plans.torchrec.sparse_dist import COPY, EMBED, EMBED_BACK, PREFETCH, START, WAIT
from swpipe.tasks.torchrec import SparseDistTasks, TrainStep
from tests.support.ranks import WELL_BEFORE_S, Ranks
from tests.tasks.torchrec.models import Job, batches, dense_optimizer, everything, sharded
from tests.tasks.torchrec.trial import Outcome, by_torchrec, create

THREADS = {
    "prefetch": {COPY: "io", START: "exchange", WAIT: "exchange", PREFETCH: "cache"},
    "split": {
        COPY: "io",
        START: "exchange",
        WAIT: "exchange",
        EMBED: "tables",
        EMBED_BACK: "tables",
    },
}
"""Plan to the tasks that go to threads of their own."""


def _threaded(name: str) -> PipelinePlan:
    """A ready-made plan with some tasks on worker threads; all else is as it was."""
    plan = plans.PLANS[name]()
    schedule = {
        task: replace(entry, thread_group=THREADS[name].get(task, entry.thread_group))
        for task, entry in plan.schedule.items()
    }
    return replace(plan, schedule=schedule)


def _late(task: PipelineTask, draws: random.Random) -> PipelineTask:
    """The task, up to two milliseconds late; on each rank by another amount."""

    def fn(ctx: Any) -> None:
        time.sleep(draws.random() * 2e-3)
        task.fn(ctx)

    return PipelineTask(task.name, fn, task.io)


def _delayed(name: str, runs: range, steps: int) -> list[str]:
    """Where trainings under random delays differ from TorchRec's."""
    job = Job(modules=2)
    wanted = by_torchrec(job, batches(steps))
    for run in runs:
        draws = random.Random(100 * run + dist.get_rank())
        model = sharded(job)
        step = TrainStep([dense_optimizer(job, model)])
        tasks = [_late(t, draws) for t in SparseDistTasks(model, step, device="cpu").tasks()]
        with SWPipeline(_threaded(name), tasks, device="cpu", stall_timeout_s=60) as pipe:
            outputs = [ctx.output for ctx in pipe.iterate(batches(steps))]
        if where := Outcome(outputs, everything(model)).differences(wanted):
            return [f"run {run}: {where}"]
    return []


@pytest.mark.parametrize("name", THREADS)
def test_threads_and_delays_change_no_result_and_never_hang(two_ranks: Ranks, name: str) -> None:
    """Up to four threads per rank issue collectives, each late by random times."""
    assert two_ranks.run(_delayed, name, range(4), 6) == [[], []]


class _OwnError(Exception):
    pass


def _one_raises() -> None:
    job = Job()
    model = sharded(job)

    def forward(batch: Any) -> Any:
        if dist.get_rank() == 1 and batch.labels is not None and next(calls) == 3:
            raise _OwnError("of rank 1")
        return model(batch)

    calls = iter(range(100))
    step = TrainStep([dense_optimizer(job, model)], forward=forward)
    with create("jagged_prefetch_sparse_dist", model, step=step) as pipeline:
        data = batches(8)
        for _ in range(8):
            pipeline.progress(data)


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_job_with_its_own_error() -> None:
    """Within seconds, and with the task and the iteration."""
    with Ranks(2, grace_s=3.0) as ranks:
        ranks.run(_delayed, "prefetch", range(1), 2)  # so that starting and importing are not timed
        begin_s = time.monotonic()
        with pytest.raises(_OwnError) as caught:
            ranks.run(_one_raises)
        assert time.monotonic() - begin_s < WELL_BEFORE_S
    notes = "\n".join(caught.value.__notes__)
    assert "on rank 1" in notes
    assert "at task 'DenseForward', iteration 3" in notes


def _different_plans() -> None:
    name = ("jagged_sparse_dist", "jagged_prefetch_sparse_dist")[dist.get_rank()]
    with create(name) as pipeline:
        pipeline.progress(batches(3))


def test_ranks_with_different_plans_are_refused(two_ranks: Ranks) -> None:
    """On all of them, before the first collective of a task."""
    with pytest.raises(RuntimeError, match="the ranks hold different plans"):
        two_ranks.run(_different_plans)
