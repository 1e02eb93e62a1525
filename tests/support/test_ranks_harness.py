"""``tests.support.ranks``: results, failures and ends."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from swpipe.errors import PlanError, Problem
from tests.support import ranks as ranks_module
from tests.support.ranks import WELL_BEFORE_S, RankDied, Ranks, RanksTimeout


def _sum_of_ranks(more: int) -> tuple[int, float, int]:
    total = torch.tensor([float(dist.get_rank() + more)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), torch.get_num_threads()


def _pid() -> int:
    return os.getpid()


def _one_raises() -> None:
    if dist.get_rank() == 1:
        raise PlanError([Problem("rank one's own")])
    dist.barrier()  # which rank 1 never reaches


def _all_raise() -> None:
    rank = dist.get_rank()

    def once() -> float:
        ranks_module.time = time
        return 1.0 - rank

    ranks_module.time = SimpleNamespace(monotonic=once)  # rank 1 raises a second sooner
    raise LookupError(f"of rank {rank}")


def _one_dies() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


def _one_never_ends() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def _unpicklable() -> object:
    return threading.Lock()


def _raise_what_no_pickle_holds() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("seen")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_all_ranks_raise_arrives_as_itself_and_the_group_lives_on(two_ranks: Ranks) -> None:
    """The first failure in time is raised; the others are in notes."""
    before = two_ranks.run(_pid)
    with pytest.raises(LookupError, match="of rank 1") as caught:
        two_ranks.run(_all_raise)
    notes = "\n".join(caught.value.__notes__)
    assert "on rank 1" in notes
    assert "_all_raise" in notes
    assert "rank 0 failed 1.0 s later: LookupError: of rank 0" in notes
    assert two_ranks.run(_pid) == before


def test_what_cannot_be_pickled_is_told(two_ranks: Ranks) -> None:
    """A result or an exception that pickle does not take is an error that says what it was."""
    with pytest.raises(TypeError, match="cannot pickle"):
        two_ranks.run(_unpicklable)
    with pytest.raises(RuntimeError, match="LocalError: seen"):
        two_ranks.run(_raise_what_no_pickle_holds)


@pytest.mark.slow
def test_one_failing_rank_ends_all_within_seconds() -> None:
    """Its exception is raised unchanged, with any arguments; the other rank is killed."""
    with Ranks(2, grace_s=0.5) as ranks:
        before = ranks.run(_pid)
        begin_s = time.monotonic()
        with pytest.raises(PlanError, match="rank one's own") as caught:
            ranks.run(_one_raises)
        assert time.monotonic() - begin_s < WELL_BEFORE_S
        assert caught.value.problems[0].text == "rank one's own"
        assert any("rank 0 still ran" in note for note in caught.value.__notes__)
        assert not any(_alive(pid) for pid in before)
        assert ranks.run(_sum_of_ranks, 0)[0][1] == 1.0  # in a new group


def test_a_rank_that_dies_is_named() -> None:
    """The error is not the one that its death caused on the other rank."""
    with Ranks(2) as ranks, pytest.raises(RankDied, match=r"rank 0 died .*_one_dies .*code 7"):
        ranks.run(_one_dies)


@pytest.mark.slow
def test_a_deadline_that_passes_shows_all_stacks_and_leaves_no_process() -> None:
    """The error names the late rank and the stack of each."""
    with Ranks(2) as ranks:
        before = ranks.run(_pid)
        with pytest.raises(RanksTimeout, match=r"ranks \[1\] within 4 s") as caught:
            ranks.run(_one_never_ends, deadline_s=4.0)
        assert "_one_never_ends" in str(caught.value)
        assert "rank 0 (had finished)" in str(caught.value)
        assert not any(_alive(pid) for pid in before)
