"""Ranks that would shortcut different tasks are refused before any of them runs."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from swpipe import SWPipeline
from tests.support.plans_for_tests import piped, tasks
from tests.support.ranks import Ranks

NAMES = [task.name for task in tasks()]
FIRST, SECOND = NAMES[:2]


def _changed(act: str, one: str, other: str, check_ranks: bool = True) -> list[str]:
    """Let rank 0 change one task and rank 1 another; return the error and the shortcut tasks."""
    with SWPipeline(piped(3), tasks(), check_ranks=check_ranks) as pipe:
        if act == "disable":
            pipe.enable_shortcut(*NAMES)
        said = []
        try:
            getattr(pipe, f"{act}_shortcut")(one if dist.get_rank() == 0 else other)
        except RuntimeError as error:
            said = [str(error)]
        else:
            assert pipe.run(range(4)).iterations == 4
        return [*said, *sorted(pipe.shortcut_tasks)]


@pytest.mark.parametrize(
    ("act", "before", "after"), [("enable", [], NAMES[:1]), ("disable", NAMES, NAMES[1:])]
)
def test_ranks_that_change_different_shortcuts_are_refused(
    two_ranks: Ranks, act: str, before: list[str], after: list[str]
) -> None:
    """All ranks refuse by name, and nothing changes; ranks that change the same ones run then."""
    for said, *left in two_ranks.run(_changed, act, FIRST, SECOND):
        assert "the ranks would shortcut different tasks" in said
        assert (f"tasks: {FIRST} on rank 0, {SECOND} on rank 1. " in said) is (act == "enable")
        assert "Enable the same tasks on all ranks, and disable the same, in the same order" in said
        assert left == sorted(before)
    assert two_ranks.run(_changed, act, FIRST, FIRST) == [sorted(after)] * 2


def test_ranks_that_go_alone_are_not_compared(two_ranks: Ranks) -> None:
    """``check_ranks=False`` leaves plans and shortcuts to each rank."""
    assert two_ranks.run(_changed, "enable", FIRST, SECOND, False) == [[FIRST], [SECOND]]


def _block_left(failing: int) -> list[str]:
    """Return the shortcut tasks after a block in which one rank failed."""
    with SWPipeline(piped(3), tasks(), stall_timeout_s=60.0) as pipe:
        pipe.run(range(2))
        if dist.get_rank() == failing:
            with pytest.raises(KeyError), pipe.shortcut(FIRST):
                raise KeyError
        else:
            pipe.enable_shortcut(FIRST)
        dist.barrier()
        return list(pipe.shortcut_tasks)


def test_a_block_that_fails_waits_for_no_rank(two_ranks: Ranks) -> None:
    """The other ranks may never reach the end of the block."""
    assert two_ranks.run(_block_left, 1) == [NAMES[:1], []]


def _nothing_to_disable() -> int:
    """Disable a task on one rank that is not shortcut."""
    with SWPipeline(piped(3), tasks(), stall_timeout_s=60.0) as pipe:
        if dist.get_rank() == 0:
            pipe.disable_shortcut()
        return pipe.run(range(4)).iterations


def test_what_is_not_shortcut_is_disabled_without_a_word(two_ranks: Ranks) -> None:
    """Nothing changes, so that there is nothing to compare."""
    assert two_ranks.run(_nothing_to_disable) == [4, 4]


def _alone() -> list[str]:
    """Let rank 0 alone disable a shortcut and enable another; return its errors."""
    with SWPipeline(piped(3), tasks(), stall_timeout_s=60.0) as pipe:
        pipe.enable_shortcut(FIRST)
        pipe._stall_timeout_s = 0.3
        said = []
        for change in (pipe.disable_shortcut, pipe.enable_shortcut):
            if dist.get_rank() == 0:
                with pytest.raises(RuntimeError) as caught:
                    change(FIRST if not said else SECOND)
                said.append(str(caught.value))
        dist.barrier()
        return said


def test_a_rank_that_changes_shortcuts_alone_is_refused() -> None:
    """It is refused after the stall timeout."""
    with Ranks(2) as ranks:  # whose checks are not counted alike after that
        for act, said in zip(("disable", "enable"), ranks.run(_alone)[0], strict=True):
            assert f"rank 1 {act}d no shortcuts within 0.3 s: {act} the same tasks" in said
