"""The benchmarks on two ranks run, at sizes too small to tell anything; their bounds are right."""

from __future__ import annotations

import pytest

pytest.importorskip("swpipe.tasks.torchrec.drop_in", exc_type=ImportError)  # without torchrec

from bench import soak, sparse_dist, torchrec_classes
from bench.contest import Contest, contest
from bench.dlrm import TINY
from bench.sparse_bound import WORK, bounds
from swpipe.plans.torchrec.sparse_dist import EMBED
from tests.support.ranks import Ranks

MS = dict.fromkeys(WORK, 1.0)


def test_the_work_bounds_a_step_on_a_quick_link() -> None:
    """One thread: the sum of the parts."""
    bound = bounds(MS, 0.0)
    assert bound.ii_us == pytest.approx(1e3 * len(WORK))
    assert "thread" in bound.limiting


def test_a_slow_link_bounds_a_step_by_both_exchanges_of_embeddings() -> None:
    """Look-up, top forward, loss, top backward and update, and twice the link's latency.

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


EXCHANGES = 20.0
"""All-to-alls per step by TorchRec's base: of sizes, ids, embeddings and their gradients."""


@pytest.mark.slow
def test_the_contest_runs_and_its_exact_contenders_agree(two_ranks: Ranks) -> None:
    """Every contender has its figures, and every verdict that can be given is given."""
    model, links = "towers", (1.0,)
    found: list[Contest] = two_ranks.run(contest, model, links, 1, 2, TINY, deadline_s=240.0)
    assert [of_rank.differ for of_rank in found] == [[], []]
    assert found[0].per_step == {"all_to_all_single": EXCHANGES, "all_reduce": 1.0}
    rows = [*sparse_dist.figures(model, found[0]), *sparse_dist.verdicts(model, found[0])]
    bars = [row.bar for row in rows if row.bar is not None]
    assert bars == [1.0, 1.1, 1.0, 1.2] * len(links)


def test_a_contender_with_other_numbers_is_noticed(two_ranks: Ranks) -> None:
    """The stale plan, were it called exact."""
    assert two_ranks.run(_miscalled) == [["semi_sync"]] * 2


def _miscalled() -> list[str]:
    from dataclasses import replace

    from bench import contest as module

    real = module.CONTENDERS
    module.CONTENDERS = tuple(replace(c, stale=False) for c in real)
    try:
        return contest("DLRM", (0.0,), 1, 2, TINY, ("TorchRec base", "semi_sync")).differ
    finally:
        module.CONTENDERS = real


@pytest.mark.parametrize("name", ["TrainPipelineSemiSync", "PrefetchTrainPipelineSparseDist"])
def test_a_class_is_timed_beside_torchrecs(two_ranks: Ranks, name: str) -> None:
    """Both take as many turns; those with arguments, or a stream, of their own."""
    for ours, theirs in two_ranks.run(torchrec_classes.duel, name, TINY, 3, 2):
        assert len(ours) == len(theirs) == 3
        assert min(*ours, *theirs) > 0


def test_a_step_calls_few_functions(one_rank: Ranks) -> None:
    """It is a count, and the same on every machine."""
    assert one_rank.run(torchrec_classes.frames)[0] <= torchrec_classes.FRAMES_BAR


def test_a_short_soak_loses_no_batch(two_ranks: Ranks) -> None:
    """As many outputs as batches, whatever comes in between."""
    for done in two_ranks.run(soak.soak, 60, 20):
        assert done.steps == done.pulled >= 60
        assert done.finite
        assert min(done.switches, done.detached, done.ends, done.left) > 0
