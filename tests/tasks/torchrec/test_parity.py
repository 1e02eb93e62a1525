"""The same numbers, bit for bit: every pipeline against TorchRec's own unpipelined one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.pairs import pairwise_cases
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import Job
from tests.tasks.torchrec.trial import (
    EXACT,
    differences,
    inferred_differences,
)

ADAM = {"optimizer": torch.optim.Adam, "options": {"lr": 0.01}, "fused": False}
"""fbgemm's fused Adam does not run on a CPU: these tables are stepped by torch's."""

QUICK = (
    Job(),
    Job("row_wise", modules=2),
    Job("column_wise", optimizer=torch.optim.Adagrad),
    Job("data_parallel"),
    Job(pooled=False),
    Job(**ADAM),
)

# On a CPU fbgemm 1.8 pools what is not to be pooled, or crashes, where tables are not fused with
# their optimizer. So collections have Adagrad, which is fused there, and are never data-parallel.
MATRIX = (
    *(
        Job(sharding, **optimizer)
        for sharding in ("table_wise", "row_wise", "column_wise", "data_parallel")
        for optimizer in ({}, ADAM)
    ),
    *(
        Job(sharding, pooled=False, optimizer=optimizer)
        for sharding in ("table_wise", "row_wise", "column_wise")
        for optimizer in (torch.optim.SGD, torch.optim.Adagrad)
    ),
)


STEPS = 10
"""Twice as many as the deepest pipeline has iterations in flight."""


FORMS = list(dict.fromkeys((job.pooled, job.optimizer) for job in MATRIX))


def _job(sharding: str, form: tuple[bool, type[torch.optim.Optimizer]]) -> Job | None:
    """The job of the matrix with these, if there is one."""
    found = (j for j in MATRIX if (j.sharding, (j.pooled, j.optimizer)) == (sharding, form))
    return next(found, None)


FOUR = pairwise_cases(
    dict.fromkeys(job.sharding for job in MATRIX),
    FORMS,
    EXACT,
    allowed=lambda case: _job(*case[:2]) is not None,
)
"""Sharding, form and pipeline: each pair of these that the matrix has."""


def _id(job: Job) -> str:
    kind = "bags" if job.pooled else "collections"
    return f"{job.sharding}-{kind}-{job.optimizer.__name__}"


@pytest.mark.parametrize("job", QUICK, ids=_id)
def test_every_pipeline_equals_torchrec(two_ranks: Ranks, job: Job) -> None:
    """Outputs of ten batches and all parameters after them are equal in every bit, on each rank."""
    assert two_ranks.run(differences, job, 10) == [{}, {}]


@pytest.mark.parametrize("forward", ["pipelined", "prefetch"])
def test_every_forward_gives_the_same(two_ranks: Ranks, forward: str) -> None:
    """Also the forwards that do not cut the graph, under the plans that support them."""
    assert two_ranks.run(_with_forward, forward) == [{}, {}]


def _with_forward(forward: str) -> dict[str, list[str]]:
    return differences(Job(modules=2), 6, EXACT[:3], forward=forward)


def test_a_shuffler_assigns_the_same_rows_under_every_plan(two_ranks: Ranks) -> None:
    """TorchRec's base pipeline, given the batches as the shuffler deals them, agrees."""
    assert two_ranks.run(differences, Job(), 6, EXACT, True) == [{}, {}]


@pytest.mark.parametrize(
    "job", [QUICK[0], *(pytest.param(job, marks=pytest.mark.slow) for job in QUICK[2::2])], ids=_id
)
def test_the_inferred_dependences_are_sufficient(two_ranks: Ranks, job: Job) -> None:
    """Random stages and threads, and no dependence but those that a recording found.

    Once it did not find that the embeddings' backward needs the dense half's: no attribute leads
    from the one to the other.
    """
    assert two_ranks.run(inferred_differences, job, 8, (1, 2)) == [{}, {}]


def test_a_stale_plan_gives_other_results(two_ranks: Ranks) -> None:
    """One batch of staleness changes all outputs but the first: these comparisons can fail."""
    found = two_ranks.run(differences, Job(), 4, ("jagged_semi_sync_sparse_dist",))
    for of_rank in found:
        where = of_rank["jagged_semi_sync_sparse_dist"]
        assert "output 0" not in where
        assert {"output 1", "output 2", "output 3"} <= set(where)


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "form", "name"), FOUR)
def test_steps_on_four_ranks(four_ranks: Ranks, sharding: str, form: Any, name: str) -> None:
    """Each pair of the matrix's shardings and forms, and of the pipelines."""
    job = _job(sharding, form)
    assert job is not None
    assert four_ranks.run(differences, job, STEPS, (name,), deadline_s=170) == [{}] * 4
