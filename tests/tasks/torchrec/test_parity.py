"""Every pipeline has the numbers of TorchRec's own unpipelined one, bit for bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import Job
from tests.tasks.torchrec.trial import ALL_MEMORY, EXACT, STALE, differences, inferred_differences

FORMS: dict[str, dict[str, Any]] = {
    "bags": {},
    "bags, stepped": {"optimizer": torch.optim.Adam, "options": {"lr": 0.01}, "fused": False},
    "bags, Adagrad": {"optimizer": torch.optim.Adagrad},
    "collections": {"pooled": False},
    "collections, Adagrad": {"pooled": False, "optimizer": torch.optim.Adagrad},
}
"""fbgemm's fused Adam does not run on a CPU: tables that have it are stepped by torch's.

On a CPU fbgemm 1.8 pools what is not to be pooled, or crashes, where tables are not fused with
their optimizer. So collections are fused, and are never data-parallel.
"""


class Case(NamedTuple):
    """A training: the job, the pipeline, and its options."""

    sharding: str
    form: str
    name: str
    forward: str
    modules: int
    shuffled: bool
    saves_memory: bool


SERIAL, SPARSE, PREFETCH, SPLIT = EXACT
CASES = (
    Case("table_wise", "bags", SPARSE, "split", 1, True, False),
    Case("row_wise", "collections", PREFETCH, "prefetch", 2, False, True),
    Case("data_parallel", "bags", SPLIT, "split", 1, False, False),
    Case("column_wise", "bags, Adagrad", SPLIT, "split", 2, True, True),
    Case("data_parallel", "bags, stepped", SPARSE, "pipelined", 1, True, True),
    Case("row_wise", "bags, stepped", SPLIT, "split", 1, False, False),
    Case("table_wise", "collections, Adagrad", SERIAL, "pipelined", 2, False, False),
    Case("column_wise", "collections", SPARSE, "prefetch", 1, False, True),
    Case("table_wise", "bags, stepped", PREFETCH, "split", 2, False, True),
)
"""Cases that combine each value with most values of others. The split plan takes only the split
forward."""

STEPS = 6
"""One more than the iterations in flight of the deepest pipeline."""


def _different() -> dict[Case, Any]:
    found = {}
    for case in CASES:
        job = Job(case.sharding, modules=case.modules, **FORMS[case.form])
        options: dict[str, Any] = {"memory": ALL_MEMORY} if case.saves_memory else {}
        if where := differences(
            job, STEPS, (case.name,), case.shuffled, forward=case.forward, **options
        ):
            found[case] = where
    return found


def test_every_pipeline_equals_torchrec(two_ranks: Ranks) -> None:
    """Outputs and all parameters after them are equal bit for bit on each rank.

    TorchRec's base pipeline gets the batches as the shuffler deals them, if there is one.
    """
    assert two_ranks.run(_different, deadline_s=200) == [{}, {}]


def test_the_inferred_dependences_are_sufficient(two_ranks: Ranks) -> None:
    """Random stages and threads have late tasks, and only the recorded dependences.

    Once the recording did not show that the embeddings' backward needs the dense half's: no
    attribute leads from the one to the other.
    """
    assert two_ranks.run(inferred_differences, Job(), STEPS, (1, 2)) == [{}, {}]


def test_a_stale_plan_gives_other_results(two_ranks: Ranks) -> None:
    """One batch of staleness changes all outputs but the first: these comparisons can fail."""
    found = two_ranks.run(differences, Job(), 4, (STALE,))
    for of_rank in found:
        assert "output 0" not in of_rank[STALE]
        assert {"output 1", "output 2", "output 3"} <= set(of_rank[STALE])
