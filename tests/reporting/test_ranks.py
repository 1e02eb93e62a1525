"""A report on two ranks: one page about the slowest, with median and worst of each task."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from swpipe import IterContext, report, task
from swpipe.reporting import StepReport
from tests.support.ranks import Ranks
from tests.support.virtual_clock import TimedHost, tell_time


def _report_on_rank() -> StepReport:
    """Report on a loop in which rank 1 reads longer, and rank 0 waits for it in a collective."""
    rank, host = dist.get_rank(), TimedHost()

    @task(pure=True)
    def read(ctx: IterContext) -> None:
        host.sleep(0.006 if rank else 0.001)
        ctx.x = torch.ones(4)

    @task(pure=True)
    def exchange(ctx: IterContext) -> None:
        ctx.received = ctx.x.clone()
        dist.all_reduce(ctx.received)

    @task
    def train(ctx: IterContext) -> None:
        host.sleep(0.004)
        dist.all_reduce(ctx.received)

    with pytest.MonkeyPatch.context() as patch:
        tell_time(patch, host)
        return report([read, exchange, train], range(8), rounds=2, device="cpu")


def test_a_report_on_two_ranks(two_ranks: Ranks) -> None:
    """Both have the same report; a table tells on which rank each task is slowest."""
    first, second = two_ranks.run(_report_on_rank)
    assert first.verdict == second.verdict
    assert first.changes == second.changes
    ranks = first.profile.ranks
    assert [of.rank for of in ranks] == [0, 1]
    assert [of.host_s["read"] for of in ranks] == pytest.approx([0.001, 0.006])
    assert ranks[first.rank].baseline_s == first.profile.baseline_s
    differences = first.profile.differences
    assert differences is not None
    assert (differences.ranks.number, differences.slowest, differences.task) == (2, 1, "read")
    for change in first.changes:
        if change.advice.plan:  # one that was tried: its collectives came in one order
            tried = change.advice.plan.schedule
            assert tried["exchange"].globally_ordered
            assert tried["train"].globally_ordered
    assert "Ranks" in first.to_html()
    assert "on 1,024 expect" in first.straggler
    assert "Rank 1 is the slowest; read takes it" in first.straggler
    assert first.straggler == second.straggler
