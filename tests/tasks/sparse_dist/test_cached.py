"""The contract of prefetched tables: plans keep it, and one in the wrong order overflows."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch.distributed as dist

from swpipe import PipelinePlan, PipelineTask, PlanError, SWPipeline
from swpipe.plans import sparse_dist as plans
from swpipe.plans.sparse_dist import EMBED, PREFETCH
from swpipe.tasks.sparse_dist import SparseDistTasks, TrainStep
from swpipe.tasks.sparse_dist.forwards import Kind
from tests.support.ranks import Ranks
from tests.tasks.sparse_dist.cached import Cache, CacheMiss, CacheOverflow, behind_cache
from tests.tasks.sparse_dist.models import Job, batches, dense_optimizer, everything, sharded
from tests.tasks.sparse_dist.trial import Outcome, by_torchrec

STEPS = 12


class Trained(NamedTuple):
    """What one rank saw.

    Attributes:
        differs: Where the numbers differ from those of TorchRec's plain loop.
        outstanding: The counter at the end.
        most: The highest it was.
        batch: The most keys that any batch had here.
        overflowed: Whether the cache did.
    """

    differs: list[str]
    outstanding: int
    most: int
    batch: int
    overflowed: bool


def prefetch_first() -> PipelinePlan:
    """The prefetch plan, but within a period the next batch is prefetched before the lookup."""
    plan = plans.prefetch()
    order = [name for name in plan.order if name != PREFETCH]
    order.insert(order.index(EMBED), PREFETCH)
    return PipelinePlan(
        plan.schedule,
        deps=plan.deps,
        cross_iter_deps=[pair for pair in plan.cross_iter_deps if pair[0] != PREFETCH],
        order=order,
        streams=plan.streams,
    )


PLANS = {**plans.PLANS, "prefetch first": prefetch_first}


def _most_keys(job: Job) -> int:
    """The most keys that any one batch has on any rank, from a serial run."""
    model = sharded(job)
    (cache,) = behind_cache(model, 10_000)
    _train(job, model, "serial", "prefetch")
    most = [0] * dist.get_world_size()
    dist.all_gather_object(most, cache.most)
    return max(most)


def _train(job: Job, model: object, plan: str, forward: Kind, *, declared: bool = True) -> Outcome:
    step = TrainStep([dense_optimizer(job, model)])
    owner = SparseDistTasks(model, step, device="cpu", forward=forward)
    tasks = owner.tasks()
    if not declared:  # what they touch: then the plan is not checked against it
        tasks = tuple(PipelineTask(task.name, task.fn) for task in tasks)
    with SWPipeline(PLANS[plan](), tasks, device="cpu", stall_timeout_s=60.0) as pipe:
        outputs = [ctx.output for ctx in pipe.iterate(batches(STEPS))]
    owner.rewrite.detach()
    return Outcome(outputs, everything(model))


def _behind_cache(plan: str, forward: Kind, declared: bool = True) -> Trained:
    """Train with as many lines as the largest batch has keys."""
    job = Job()
    batch = _most_keys(job)
    model = sharded(job)
    (cache,) = behind_cache(model, batch)
    try:
        outcome = _train(job, model, plan, forward, declared=declared)
    except CacheOverflow:
        return Trained([], cache.outstanding, cache.most, batch, True)
    differs = outcome.differences(by_torchrec(job, batches(STEPS)))
    return Trained(differs, cache.outstanding, cache.most, batch, False)


@pytest.mark.parametrize(
    ("plan", "forward"), [("serial", "prefetch"), ("prefetch", "prefetch"), ("split", "split")]
)
def test_a_cache_of_one_batch_is_enough(two_ranks: Ranks, plan: str, forward: Kind) -> None:
    """Each batch is looked up before the next is prefetched; numbers are the plain loop's."""
    for trained in two_ranks.run(_behind_cache, plan, forward):
        assert not trained.overflowed
        assert trained.differs == []
        assert trained.outstanding == 0
        assert 0 < trained.most <= trained.batch


def test_a_plan_that_prefetches_before_the_forward_is_refused(two_ranks: Ranks) -> None:
    """The tasks declare the cache as a state, so the plan that breaks its order cannot start."""
    with pytest.raises(PlanError, match="state 'table cache'"):
        two_ranks.run(_behind_cache, "prefetch first", "prefetch")


def test_prefetch_before_forward_overflows(two_ranks: Ranks) -> None:
    """Undeclared, two batches are outstanding at once, in the very first full period."""
    for trained in two_ranks.run(_behind_cache, "prefetch first", "prefetch", False):
        assert trained.overflowed
        assert trained.most > trained.batch


def test_a_lookup_needs_what_was_prefetched() -> None:
    """And not what was looked up before, or never loaded."""
    cache = Cache(lines=4)
    cache.prefetch([1, 2])
    cache.look_up([1, 2])
    with pytest.raises(CacheMiss, match="2 of 2 rows"):
        cache.look_up([1, 2])
    with pytest.raises(CacheMiss, match="1 of 1 rows"):
        cache.look_up([3])


def test_pinned_rows_are_not_evicted() -> None:
    """The least recently used of the others go."""
    cache = Cache(lines=4)
    cache.prefetch([1, 2])
    cache.look_up([1, 2])
    cache.prefetch([3, 4, 5])
    with pytest.raises(CacheOverflow, match="5 keys are outstanding and the cache has 4 lines"):
        cache.prefetch([6, 7])
    assert list(cache._rows) == [2, 3, 4, 5]
