"""Whatever order the threads run in: no deadlock, the same numbers, the same order of batches."""

from __future__ import annotations

from functools import partial

import pytest

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from tests.support.budget import seeds
from tests.support.cpu_on import CpuOn
from tests.support.exploring import ExploringHost
from tests.support.plans_for_tests import NAMES, piped, spread

SCHEDULES = 30
PLANS = {
    "two groups": piped(),
    "two groups, deep": piped(depth=5),
    "four groups": spread(),
    "workers only": spread(("a", "b", "a", "b", "c")),
}


def tasks_that_tell(host: ExploringHost, ran: list[tuple[str, int]]) -> list[PipelineTask]:
    """Return tasks that let other threads run, and then note their name and batch in ``ran``."""

    def run(name: str, ctx: IterContext) -> None:
        host.pause()
        ran.append((name, ctx.batch))

    return [PipelineTask(name, partial(run, name)) for name in NAMES]


def interleaving_of(plan: PipelinePlan, seed: int) -> list[tuple[str, int]]:
    """Return the runs of tasks over six batches, in order."""
    host, ran = ExploringHost(seed), []
    tasks = tasks_that_tell(host, ran)
    with SWPipeline(plan, tasks, device=CpuOn(host), stall_timeout_s=None) as pipe:
        assert [ctx.batch for ctx in pipe.iterate(range(6))] == list(range(6))
    return ran


@pytest.mark.examples
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_one_plan_under_many_schedules(plan: PipelinePlan) -> None:
    """Each schedule ends, and keeps the order of every task's iterations; many schedules differ."""
    interleavings = set()
    for seed in seeds("interleavings", SCHEDULES):
        ran = interleaving_of(plan, seed)
        for name in NAMES:
            assert [i for task, i in ran if task == name] == list(range(6))
        interleavings.add(tuple(ran))
    assert len(interleavings) > SCHEDULES // 4


def test_the_same_seed_gives_the_same_interleaving() -> None:
    """A failure that was found can be found again."""
    assert interleaving_of(spread(), 7) == interleaving_of(spread(), 7)
