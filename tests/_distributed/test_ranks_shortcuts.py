"""Ranks that would shortcut different tasks are refused before any of them runs."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from swpipe import SWPipeline, TaskProfiler
from tests.support.plans_for_tests import piped, tasks
from tests.support.ranks import Ranks


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


def _disabled(one: str, other: str) -> list[str]:
    """What is said and still shortcut where all tasks are, and each rank disables its own."""
    with SWPipeline(piped(3), tasks()) as pipe:
        pipe.enable_shortcut(*NAMES)
        try:
            pipe.disable_shortcut(one if dist.get_rank() == 0 else other)
        except RuntimeError as error:
            return [str(error), *sorted(pipe.shortcut_tasks)]
        assert pipe.run(range(4)).iterations == 4
        return sorted(pipe.shortcut_tasks)


def test_ranks_that_disable_different_shortcuts_are_refused(two_ranks: Ranks) -> None:
    """On all of them alike, by name; everything is shortcut as before."""
    for said in two_ranks.run(_disabled, NAMES[0], NAMES[1]):
        assert "the ranks would shortcut different tasks" in said[0]
        assert "and disable the same, in the same order" in said[0]
        assert said[1:] == sorted(NAMES)


def test_ranks_that_disable_the_same_shortcut_run(two_ranks: Ranks) -> None:
    """The others are still shortcut."""
    assert two_ranks.run(_disabled, NAMES[0], NAMES[0]) == [sorted(NAMES[1:])] * 2


def _block_left(failing: int) -> list[str]:
    """What is shortcut after a block in which one rank failed; both ranks come out of it."""
    with SWPipeline(piped(3), tasks(), stall_timeout_s=60.0) as pipe:
        pipe.run(range(2))
        if dist.get_rank() == failing:
            with pytest.raises(KeyError), pipe.shortcut(NAMES[0]):
                raise KeyError
        else:
            pipe.enable_shortcut(NAMES[0])
        dist.barrier()
        return list(pipe.shortcut_tasks)


def test_a_block_that_fails_waits_for_no_rank(two_ranks: Ranks) -> None:
    """The others may never come to its end."""
    assert two_ranks.run(_block_left, 1) == [NAMES[:1], []]


def _nothing_to_disable() -> int:
    """One rank disables what is not shortcut."""
    with SWPipeline(piped(3), tasks(), stall_timeout_s=60.0) as pipe:
        if dist.get_rank() == 0:
            pipe.disable_shortcut()
        return pipe.run(range(4)).iterations


def test_what_is_not_shortcut_is_disabled_without_a_word(two_ranks: Ranks) -> None:
    """Nothing changes, so there is nothing to compare."""
    assert two_ranks.run(_nothing_to_disable) == [4, 4]


def _profiled() -> str:
    with SWPipeline(piped(3), tasks()) as pipe:
        try:
            TaskProfiler(pipe).profile(0, 1, 2, 2, tasks=NAMES[dist.get_rank()])
        except RuntimeError as error:
            return str(error)
    return ""


def test_ranks_that_profile_different_tasks_are_refused(two_ranks: Ranks) -> None:
    """A profile shortcuts one task after the other."""
    for said in two_ranks.run(_profiled):
        assert "the ranks would shortcut different tasks" in said


def _alone(act: str) -> str:
    with SWPipeline(piped(3), tasks(), stall_timeout_s=60.0) as pipe:
        if act == "disable":
            pipe.enable_shortcut(NAMES[0])
        pipe._stall_timeout_s = 0.3
        said = ""
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=f"rank 1 has not {act}d shortcuts") as caught:
                getattr(pipe, f"{act}_shortcut")(NAMES[0])
            said = str(caught.value)
        dist.barrier()
        return said


@pytest.mark.parametrize("act", ["enable", "disable"])
def test_a_rank_that_changes_shortcuts_alone_is_refused(act: str) -> None:
    """After the time in which a stall is one."""
    with Ranks(2) as ranks:
        assert "within 0.3 s" in ranks.run(_alone, act)[0]
