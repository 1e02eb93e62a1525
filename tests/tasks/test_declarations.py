"""Every ready-made plan is proved by its tasks' declarations, without a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

pytest.importorskip("torchrec")

from swpipe import PipelinePlan, PipelineTask
from swpipe.analysis import verify
from swpipe.analysis.verification import verify_for_run
from swpipe.errors import PlanError
from swpipe.plans.torchrec import sparse_dist
from swpipe.tasks.torchrec import (
    IdentityShuffler,
    KarmarkarKarpShuffler,
    PipelineStage,
    SparseDistTasks,
    StagedTrainPipeline,
    TaskOptions,
    TrainStep,
)
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import CPU, Batch, Job, dense_optimizer, sharded


def _unproved(
    tasks: Iterable[PipelineTask], plans: dict[str, Callable[[], PipelinePlan]]
) -> list[str]:
    """Return the problems of each plan by the tasks' declarations alone."""
    tasks, found = tuple(tasks), []
    for name, make in plans.items():
        try:
            if undeclared := verify(make(), tasks, pull_ahead=True).undeclared:
                found.append(f"{name}: {undeclared} are undeclared")
        except PlanError as error:
            found.append(f"{name}: {error}")
        found += [
            f"{name}: is not proved, with streams={streams}"
            for streams in (False, True)
            if not verify_for_run(
                make(), tasks, None, device="cpu", streams=streams
            ).proved_by_declarations()
        ]
    return found


def _sparse_dist(plan_names: tuple[str, ...], **options: object) -> list[str]:
    job = Job()
    model = sharded(job)
    step = TrainStep([dense_optimizer(job, model)])
    tasks = SparseDistTasks(model, step, TaskOptions(**options), device=CPU)  # type: ignore[arg-type]
    plans = {name: sparse_dist.PLANS[name] for name in plan_names}
    if tasks.options.pipeline_postproc:
        plans = {n: lambda m=make: sparse_dist.with_postproc(m()) for n, make in plans.items()}
    return _unproved(tasks.tasks(), plans)


def _all_kinds() -> list[str]:
    exact = ("serial", "copy_ahead", "sparse_dist", "prefetch")
    found = _sparse_dist(tuple(sparse_dist.PLANS), forward="split")
    for kind in ("prefetch", "pipelined", "own"):
        found += _sparse_dist(exact, forward=kind)
    ours = KarmarkarKarpShuffler(Batch.work)
    for shuffler in (IdentityShuffler(), ours):
        for postproc in (False, True):
            found += _sparse_dist(
                tuple(sparse_dist.PLANS), shuffler=shuffler, pipeline_postproc=postproc
            )
    ours.close()
    return found


def test_the_eleven_tasks_are_declared(two_ranks: Ranks) -> None:
    """Any call of the sharded modules is covered, with a shuffler and modules that run ahead."""
    assert two_ranks.run(_all_kinds) == [[], []]


def _own_losses() -> tuple[str, ...]:
    job = Job()
    model = sharded(job)
    step = TrainStep([dense_optimizer(job, model)], on_losses=lambda losses: losses / 2)
    tasks = SparseDistTasks(model, step, device=CPU).tasks()
    (undeclared,) = {
        verify(make(), tasks, pull_ahead=True).undeclared for make in sparse_dist.PLANS.values()
    }  # all plans have it with the loop's body
    return undeclared


def test_a_users_function_of_the_losses_is_not_declared_for_him(two_ranks: Ranks) -> None:
    """It stays with the loop's body, which is where all ready-made plans have it."""
    assert two_ranks.run(_own_losses) == [(sparse_dist.LOSS,)] * 2


def test_stages_share_nothing_but_their_batches() -> None:
    """Each has its own state, as in TorchRec."""
    stages = [PipelineStage(name, lambda rows: rows, None) for name in ("a", "b", "b")]
    pipe = StagedTrainPipeline(stages).pipe
    assert _unproved(pipe.tasks, {"staged": lambda: pipe.plan}) == []
