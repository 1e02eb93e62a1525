"""Ranks that would shortcut different tasks are refused before any of them runs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskProfiler
from swpipe._distributed import rank_checks as ranks_module
from tests.support.plans_for_tests import piped, tasks
from tests.support.ranks import WELL_BEFORE_S, Ranks


def _enabled(one: str, other: str, check_ranks: bool = True) -> list[str]:
    """What is shortcut where rank 0 asks for one task and rank 1 for another."""
    with SWPipeline(piped(3), tasks(), check_ranks=check_ranks) as pipe:
        try:
            pipe.enable_shortcut(one if dist.get_rank() == 0 else other)
        except RuntimeError as error:
            return [str(error), *pipe.shortcut_tasks]
        assert pipe.run(range(4)).iterations == 4
        return sorted(pipe.shortcut_tasks)


NAMES = [task.name for task in tasks()]


def test_ranks_that_shortcut_different_tasks_are_refused(two_ranks: Ranks) -> None:
    """On all of them alike, by name, and nothing is shortcut."""
    for said in two_ranks.run(_enabled, NAMES[0], NAMES[1]):
        assert len(said) == 1
        assert f"tasks: {NAMES[0]} on rank 0, {NAMES[1]} on rank 1. " in said[0]
        assert "Enable the same tasks on all ranks" in said[0]


def test_ranks_that_shortcut_the_same_task_run(two_ranks: Ranks) -> None:
    """After a refusal, too."""
    assert two_ranks.run(_enabled, NAMES[0], NAMES[0]) == [NAMES[:1]] * 2


def test_ranks_that_go_alone_are_not_compared(two_ranks: Ranks) -> None:
    """``check_ranks=False`` leaves plans and shortcuts to each rank."""
    assert two_ranks.run(_enabled, NAMES[0], NAMES[1], False) == [[NAMES[0]], [NAMES[1]]]


def _profiled() -> str:
    with SWPipeline(piped(3), tasks()) as pipe:
        try:
            TaskProfiler(pipe).profile(0, 1, 2, 1, tasks=NAMES[dist.get_rank()])
        except RuntimeError as error:
            return str(error)
    return ""


def test_ranks_that_profile_different_tasks_are_refused(two_ranks: Ranks) -> None:
    """A profile shortcuts one task after the other."""
    for said in two_ranks.run(_profiled):
        assert "the ranks would shortcut different tasks" in said


def _goes_on_alone() -> str:
    """Rank 0 enables a task after two steps and rank 1 does not; what rank 0 is told."""

    def meet(ctx: IterContext) -> None:
        dist.all_reduce(torch.ones(1))

    alone = [PipelineTask("meet", meet)]
    with SWPipeline(PipelinePlan.serial(alone), alone, stall_timeout_s=60.0) as pipe:
        batches, said = iter(range(6)), ""
        for _ in range(2):
            pipe.progress(batches)
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError) as caught:
                pipe.enable_shortcut("meet")
            said = str(caught.value)
        pipe.progress(batches)
        pipe.enable_shortcut("meet")
        for _ in range(3):
            pipe.progress(batches)
    return said


@pytest.mark.slow
def test_a_rank_that_goes_on_without_is_noticed() -> None:
    """Long before the time-out; and ranks that are alike from then on run."""
    with Ranks(2) as ranks:
        begun_s = time.monotonic()
        told = ranks.run(_goes_on_alone)[0]
        assert time.monotonic() - begun_s < WELL_BEFORE_S
    assert told == (
        "rank 1 has begun period 2 without the shortcuts that this rank enables before period 2: "
        "enable the same tasks on all ranks, between the same two steps"
    )


def _comes_late() -> list[str]:
    """Rank 1 answers for pipelines that have not gone on without, and then enables the task."""
    with (
        SWPipeline(piped(3), tasks(), stall_timeout_s=60.0) as other,
        SWPipeline(piped(3), tasks(), stall_timeout_s=60.0) as pipe,
    ):
        other.run(range(5))
        pipe.run(range(2))
        if dist.get_rank() == 1:
            waiting = ranks_module._SHORTCUTS.format(ranks_module._turns.count, ranks_module._ANY)
            _get_default_store().wait([waiting])
            assert other._driver.ranks.periods > pipe._driver.ranks.periods
            other._driver.ranks.answer()
            pipe._driver.ranks.answer()
        pipe.enable_shortcut(NAMES[0])
        return list(pipe.shortcut_tasks)


def test_a_rank_that_is_late_is_waited_for(two_ranks: Ranks) -> None:
    """While it is at another pipeline, of the same plan even, or no period ahead of the others."""
    assert two_ranks.run(_comes_late) == [NAMES[:1]] * 2


def _alone() -> str:
    with SWPipeline(piped(3), tasks(), stall_timeout_s=0.3) as pipe:
        said = ""
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="rank 1 has not enabled shortcuts") as caught:
                pipe.enable_shortcut(NAMES[0])
            said = str(caught.value)
        dist.barrier()
        return said


def test_a_rank_that_shortcuts_alone_is_refused() -> None:
    """After the time in which a stall is one."""
    with Ranks(2) as ranks:
        assert "within 0.3 s" in ranks.run(_alone)[0]
