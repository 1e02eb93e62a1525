"""Training goes on unchanged after each of the eleven tasks, and each pair, was shortcut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, repeat
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from swpipe.plans.torchrec.sparse_dist import TASKS
from swpipe.profiler.trial_state import trial_state
from swpipe.tasks.torchrec import PipelineFactory
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import CPU, Job, batches, dense_optimizer, everything, sharded
from tests.tasks.torchrec.trial import to_the_end

PAIRS = tuple(combinations(TASKS, 2))
PLANS = {"jagged_sw_serial": PAIRS[::2], "jagged_prefetch_sparse_dist": PAIRS[1::2]}
"""Serial and pipelined, and the pairs that are shortcut there: each pair under one of them."""

Tensors: TypeAlias = dict[str, Tensor]

ALONE = tuple((name,) for name in TASKS)


def _trained(plan: str, shortcuts: Sequence[tuple[str, ...] | None]) -> Iterator[Tensors]:
    """The parameters after one batch more; each time, tasks were shortcut before it."""
    job = Job()
    model = sharded(job)
    replayed = next(batches(1, seed=1))
    with PipelineFactory.create(
        plan, model=model, optimizer=dense_optimizer(job, model), device=CPU
    ) as pipeline:
        pipe = pipeline.pipe
        for names, batch in zip(shortcuts, batches(len(shortcuts)), strict=True):
            if names is not None:
                with trial_state(pipe, replayed, None).trial(), pipe.shortcut(*names):
                    to_the_end(pipeline, repeat(replayed, 4))
            to_the_end(pipeline, iter([batch]))
            yield {name: value.clone() for name, value in everything(model).items()}


def _differing(plan: str, shortcuts: tuple[tuple[str, ...], ...]) -> list[str]:
    """The first shortcut after which training differs in any bit."""
    apart = zip(_trained(plan, [None] * len(shortcuts)), _trained(plan, shortcuts), strict=True)
    for names, (expected, trained) in zip(shortcuts, apart, strict=True):
        if not all(torch.equal(expected[name], trained[name]) for name in expected):
            return ["+".join(names)]
    return []


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
