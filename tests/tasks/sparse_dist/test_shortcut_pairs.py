"""Training goes on unchanged after each of the eleven tasks, and each pair, was shortcut."""

from __future__ import annotations

from itertools import combinations, repeat

import pytest
import torch
from torch import Tensor

from swpipe._state.discovery import find_state
from swpipe._state.guard import TrainingGuard
from swpipe._state.snapshot import Snapshot
from swpipe.plans.sparse_dist import TASKS
from swpipe.tasks.sparse_dist import PipelineFactory
from tests.support.ranks import Ranks
from tests.tasks.sparse_dist.models import CPU, Job, batches, dense_optimizer, everything, sharded
from tests.tasks.sparse_dist.trial import to_the_end

PAIRS = tuple(combinations(TASKS, 2))
PLANS = {"jagged_sw_serial": PAIRS[::2], "jagged_prefetch_sparse_dist": PAIRS[1::2]}
"""Serial and pipelined, and the pairs that are shortcut there: each pair under one of them."""

ALONE = tuple((name,) for name in TASKS)


def _trained(plan: str, names: tuple[str, ...] | None) -> dict[str, Tensor]:
    """What three batches train, in the middle of which tasks are shortcut."""
    job = Job()
    model = sharded(job)
    data = list(batches(3))
    with PipelineFactory.create(
        plan, model=model, optimizer=dense_optimizer(job, model), device=CPU
    ) as pipeline:
        to_the_end(pipeline, iter(data[:1]))
        if names is not None:
            pipe = pipeline.pipe
            snapshot = Snapshot(find_state(pipe.tasks), pipe.device)
            with TrainingGuard(pipe.tasks, snapshot), pipe.shortcut(*names):
                to_the_end(pipeline, repeat(data[1], 4))
            snapshot.restore()
        to_the_end(pipeline, iter(data[1:]))
    return everything(model)


def _differing(plan: str, shortcuts: tuple[tuple[str, ...], ...]) -> list[str]:
    """The shortcuts after which training differs in any bit."""
    expected = _trained(plan, None)
    found = []
    for names in shortcuts:
        trained = _trained(plan, names)
        if not all(torch.equal(expected[name], trained[name]) for name in expected):
            found.append("+".join(names))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_one_rank(one_rank: Ranks, plan: str) -> None:
    """Each task; nothing outside the snapshot is trained meanwhile."""
    assert one_rank.run(_differing, plan, ALONE, deadline_s=300) == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("pairs", [False, True], ids=["alone", "pairs"])
def test_two_ranks(two_ranks: Ranks, plan: str, pairs: bool) -> None:
    """Each task, and each pair, with sharded tables."""
    shortcuts = PLANS[plan] if pairs else ALONE
    assert two_ranks.run(_differing, plan, shortcuts, deadline_s=300) == [[], []]
