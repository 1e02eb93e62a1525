"""Ranks whose data ends at different steps, in the loops of DDP and FSDP: those of even data."""

from __future__ import annotations

import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import swpipe
from swpipe import EvenData
from swpipe.loops import RankDataError, pad_with
from tests.loops.even_jobs import differs
from tests.support.pairs import pairwise_cases
from tests.support.ranks import Ranks
from tests.support.scripts import Script, Scripts


@pytest.mark.parametrize(
    ("kind", "ends", "way", "then"),
    [
        case
        for case in pairwise_cases(
            ("ddp", "fsdp"),
            ("stop", "pad"),
            ("plain", "ahead", "overlap", "overlapped task"),
            ("ended", "left", "resumed"),
        )
        if case[2:4] != ("plain", "resumed")
    ],
)
def test_the_numbers_are_those_of_even_data(
    two_ranks: Ranks, kind: str, ends: str, way: str, then: str
) -> None:
    """Losses, parameters and random numbers, on both ranks, bit for bit."""
    assert two_ranks.run(differs, kind, ends, way, then) == [[], []]


def test_neither_torchrec_nor_fbgemm_is_needed(scripts: Scripts, tmp_path: Path) -> None:
    """They cannot be imported, and the numbers are the same."""
    store = str(tmp_path / "store")
    ranks = [Script(module="tests.loops.even_jobs", args=(rank, store)) for rank in ("0", "1")]
    assert scripts.run_together(ranks) == [(0, "[[], []]\n", "")] * 2


class _Gated:
    """Batches that this rank may pull only so far, until the gate is open."""

    def __init__(self, free: int) -> None:
        self.free, self.gate, self.pulled = free, threading.Event(), threading.Event()

    def __iter__(self) -> Any:
        for k in range(9):
            if k >= self.free:
                self.pulled.set()
                assert self.gate.wait(30.0)
            yield k


def _left_apart() -> list[list[int]]:
    """A pass is left where one rank has asked for more steps than the other; then another pass."""
    rank = dist.get_rank()
    own = _Gated(9 if rank == 0 else 4)
    passes = []
    with EvenData(ahead=0, timeout_s=30.0) as even:
        loop = swpipe.ahead(even.loader(own), prefetch=4)
        batches = iter(loop)
        passes.append(list(islice(batches, 2)))
        if rank == 1:
            assert own.pulled.wait(30.0)  # the thread of rank 0 has asked for this step
            own.free = 9
        dist.barrier()
        if rank == 1:
            threading.Timer(0.2, own.gate.set).start()
        batches.close()
        passes.append(list(loop))
    return passes


def test_a_pass_may_be_left_where_ranks_have_pulled_differently(two_ranks: Ranks) -> None:
    """The next one begins at the same step on all ranks."""
    assert two_ranks.run(_left_apart) == [[[0, 1], list(range(9))]] * 2


def _leaves_while_it_waits() -> bool:
    """Rank 0 leaves a pass whose thread waits for the other rank; whether the thread ends."""
    before, ended = {*threading.enumerate()}, True
    own = _Gated(3)
    if dist.get_rank() == 0:
        own.gate.set()
    with EvenData(ahead=0, timeout_s=60.0) as even:
        batches = iter(swpipe.ahead(even.loader(own), prefetch=4))
        list(islice(batches, 2))
        if dist.get_rank() == 0:
            assert own.pulled.wait(30.0)  # the other rank does not pull this batch
            batches.close()
            deadline = time.monotonic() + 20.0
            while not ({*threading.enumerate()} <= before or time.monotonic() > deadline):
                time.sleep(0.01)
            ended = {*threading.enumerate()} <= before
        dist.barrier()
        own.gate.set()
        batches.close()
    return ended


def test_a_pass_that_is_left_waits_for_no_rank(two_ranks: Ranks) -> None:
    """Its thread ends, though the other rank does not say whether it has a batch."""
    assert two_ranks.run(_leaves_while_it_waits) == [True, True]


def _one_leaves() -> tuple[int, str]:
    """Rank 0 leaves its first pass after two steps, and the other does not."""
    seen = 0
    even = EvenData(ahead=1, timeout_s=5.0)
    try:
        for epoch in range(2):
            for _ in even.loader(range(5)):
                seen += 1
                if dist.get_rank() == epoch == 0 and seen == 2:
                    break
    except RankDataError as error:
        return seen, str(error)
    finally:
        dist.barrier()
    return seen, ""


def test_a_pass_that_one_rank_leaves_alone_is_an_error_on_the_others(two_ranks: Ranks) -> None:
    """Steps of two passes never meet."""
    (seen, told), (others, why) = two_ranks.run(_one_leaves)
    assert (seen, others) == (2, 3)
    assert "some rank has not said within 5 s" in told
    assert "ranks [0] have begun another pass before step 3 of this one" in why


def test_an_iterator_has_one_pass() -> None:
    """What was pulled ahead of a pass that is left would be missing in the next."""
    with EvenData() as even:
        with pytest.raises(TypeError, match="an iterator .generator., which has one pass"):
            even.loader(k for k in range(3))
        assert list(even.over(k for k in range(3))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("loader", "pad", "why"),
    [
        ((1, 2), None, ""),
        ([1, 2], None, "is over a list, which the loop may change"),
        ((1, 2), pad_with(0), "pads by a function, which may read what the loop changes"),
    ],
)
def test_what_a_pull_may_touch_is_that_of_the_loader(loader: Any, pad: Any, why: str) -> None:
    """``overlap`` pulls it ahead where it would pull that one, unless it calls a pad."""
    with EvenData("stop" if pad is None else "pad", pad=pad) as even:
        given = even.loader(loader)
        if why:
            with pytest.warns(RuntimeWarning, match=why):
                loop = swpipe.overlap(given, [_nothing])
        else:
            loop = swpipe.overlap(given, [_nothing])
        assert loop.overlap.loader_ahead is not bool(why)
        loop.close()


def _nothing(ctx: Any) -> None:
    """A task."""
