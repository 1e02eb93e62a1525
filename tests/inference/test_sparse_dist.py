"""A recording of the recommender's training step on sharded modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchrec")

from swpipe.analysis import verify
from swpipe.errors import PlanError
from swpipe.inference import Recording, record
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec import SparseDistTasks, TaskOptions, TrainStep
from tests.tasks.torchrec.models import CPU, Job, batches, dense_optimizer, sharded


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    """Two iterations of the eleven tasks with the split forward, on one rank."""
    store = Path(tmp_path_factory.mktemp("ranks"), "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what TorchRec says of itself
            job = Job()
            model = sharded(job)
            step = TrainStep([dense_optimizer(job, model)])
            tasks = SparseDistTasks(model, step, TaskOptions(forward="split"), device=CPU)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            yield record(tasks.tasks(), next(iter(batches(1))), device=CPU)
            after = [parameter.detach() for parameter in model.parameters()]
            assert all(map(torch.equal, before, after))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", plans.PLANS)
def test_no_dependence_is_missing_in_the_ready_made_plans(recording: Recording, name: str) -> None:
    """Every conflict is ordered or allowed to be stale."""
    plan = plans.PLANS[name]()
    assert recording.compare(plan).missing == ()
    verify(plan, recording.tasks, effects=recording.effects, pull_ahead=True)


def test_staleness_is_recognised(recording: Recording) -> None:
    """Embeddings are looked up before the update; only the tables are stale."""
    (one,) = recording.compare(replace(plans.semi_sync(), stale={})).missing
    assert one[:3] == (plans.EMBED, plans.EMBED_BACK, 1)
    assert [str(place) for place in one.places] == ["state 'tables'"]


def test_tasks_that_set_the_current_batch_are_ordered(recording: Recording) -> None:
    """The replaced forwards are one for all batches: two threads would set them at one time.

    Only a stale plan lets the next look-up run beside this batch's dense half, and only one that
    does not have the two take turns since they communicate.
    """
    stale = plans.semi_sync()
    plan = replace(stale, same_period_deps=[(plans.EMBED_BACK, plans.EMBED)])
    apart = {
        name: replace(plan.schedule[name], thread_group="look-ups", globally_ordered=False)
        for name in (plans.PREFETCH, plans.EMBED)
    }
    with pytest.raises(PlanError, match="'current batch'"):
        verify(replace(plan, schedule={**plan.schedule, **apart}), recording.tasks, pull_ahead=True)
    verify(plan, recording.tasks, pull_ahead=True)


def test_collectives_are_recorded(recording: Recording) -> None:
    """The exchange of sizes, and the reduction of gradients."""
    assert {plans.START, plans.DENSE_BACK} <= recording.collectives <= plans.ORDERED
