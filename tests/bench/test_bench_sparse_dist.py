"""The benchmarks on two ranks run at sizes too small to be meaningful; their bounds are right."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip(
    "swpipe.tasks.torchrec.pipelines.drop_in", exc_type=ImportError
)  # without torchrec

from bench import contest as module
from bench import memory, sparse_dist, torchrec_classes, torchrec_links
from bench.contest import Contest, contest
from bench.dlrm import TINY
from bench.sparse_bound import WORK, bounds
from swpipe.plans.torchrec.sparse_dist import EMBED
from tests.support.ranks import Ranks

MS = dict.fromkeys(WORK, 1.0)


def test_the_work_bounds_a_step_on_a_quick_link() -> None:
    """On one thread the bound is the sum of the parts."""
    bound = bounds(MS, 0.0)
    assert bound.ii_us == pytest.approx(1e3 * len(WORK))
    assert "thread" in bound.limiting


def test_a_slow_link_bounds_a_step_by_both_exchanges_of_embeddings() -> None:
    """It is look-up, top forward, loss, top backward and update, and twice the latency.

    The update counts from the last gradients on.
    """
    bound = bounds(MS, 20.0)
    assert bound.ii_us == pytest.approx(1e3 * (5 + 2 * 20))
    assert f"{EMBED} i" in bound.limiting


def test_a_batch_of_staleness_halves_the_cycle_down_to_that_of_the_dense_part() -> None:
    """Two steps have one cycle's time, unless the all-reduce takes longer.

    That cycle has the dense forward and backward in two parts each, the loss and the optimizer.
    """
    slow_tables = {**MS, EMBED: 40.0}
    exact, stale = bounds(slow_tables, 20.0), bounds(slow_tables, 20.0, 1)
    assert stale.rec_mii_us == pytest.approx(exact.rec_mii_us / 2)
    assert bounds(MS, 20.0, 1).rec_mii_us == pytest.approx(1e3 * (7 + 20))


NAMES = ("TorchRec base", "TorchRec staged", "TorchRec semi-sync", "split", "semi_sync")


@pytest.mark.slow
def test_the_contest_runs_and_its_exact_contenders_agree(two_ranks: Ranks) -> None:
    """Every contender has its figures, and every verdict that is possible."""
    found: list[Contest] = two_ranks.run(
        contest, "DLRM", (1.0,), 1, 2, TINY, NAMES, deadline_s=240.0
    )
    assert [of_rank.differ for of_rank in found] == [[], []]
    assert found[0].per_step == {"all_to_all_single": 5.0, "all_reduce": 1.0}
    rows = [*sparse_dist.figures("DLRM", found[0]), *sparse_dist.verdicts("DLRM", found[0])]
    assert [row.bar for row in rows if row.bar is not None] == [1.0, 1.1, 1.0, 1.2]


def test_a_contender_with_other_numbers_is_noticed(two_ranks: Ranks) -> None:
    """The stale plan is noticed if it is called exact."""
    assert two_ranks.run(_miscalled) == [["semi_sync"]] * 2


def _miscalled() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        exact = tuple(replace(one, stale=False) for one in module.CONTENDERS)
        patch.setattr(module, "CONTENDERS", exact)
        return contest("DLRM", (0.0,), 1, 2, TINY, ("TorchRec base", "semi_sync")).differ


def test_every_plan_stands_beside_torchrecs_best_exact_class() -> None:
    """The best of ours has a bar; stale plans, the others and the bound are for information."""
    ms = {one.name: [20.0, 22.0] for one in module.CONTENDERS}
    ms |= {"TorchRec semi-sync": [1.0, 1.0], "TorchRec fused": [10.0, 11.0], "split": [9.0, 9.9]}
    rows = [*torchrec_links._rows("DLRM", Contest(ms={5.0: ms}, parts={5.0: [MS, MS]}))]
    assert rows[0].what == "DLRM, L = 5 ms: split over TorchRec fused"
    assert rows[0].bar == torchrec_links.BARS[5.0]
    assert rows[0].ratio is not None
    assert rows[0].ratio.median == pytest.approx(0.9)
    assert [row.bar for row in rows[1:]] == [None] * (len(rows) - 2) + [1.0]
    assert len(rows) == sum(one.ours for one in module.CONTENDERS) + 2
    bound = rows[-2]
    assert bound.what == "DLRM, L = 5 ms: the bound over TorchRec fused"
    assert bound.ours == "15.00 [15.00 .. 15.00] ms"


def test_a_class_is_timed_beside_torchrecs(two_ranks: Ranks) -> None:
    """Both have the same number of turns; one class has its own stream."""
    name = "PrefetchTrainPipelineSparseDist"
    for ours, theirs in two_ranks.run(torchrec_classes.duel, name, TINY, 3, 2):
        assert len(ours) == len(theirs) == 3
        assert min(*ours, *theirs) > 0


def test_a_step_calls_few_functions(one_rank: Ranks) -> None:
    """The number of calls is the same on every machine."""
    assert one_rank.run(torchrec_classes.frames)[0] <= torchrec_classes.FRAMES_BAR


def test_what_a_step_of_torchrecs_leaves_is_counted(two_ranks: Ranks) -> None:
    """It is counted over several passes."""
    for objects, _ in two_ranks.run(memory.on_rank, 2):
        assert objects < memory.OBJECTS
