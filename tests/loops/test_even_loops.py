"""Loops that pull ahead on ranks whose data ends at different steps: the steps of even data."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import swpipe
from swpipe import EvenData, PipelineTask
from swpipe.loops import RankDataError, pad_with, pull_times
from tests.support.ranks import Ranks

ROWS = (22, 13)
"""The rows of each rank; with 4 in a batch, 6 batches and 4."""

EPOCHS = 2
LEFT = 3  # steps after which a pass is left

PAD = torch.zeros(4)


class Training:
    """Training steps that need all ranks, and draw."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.totals: list[Tensor] = []

    def step(self, batch: Tensor) -> None:
        """Run the body of a plain loop."""
        total = batch.sum() * torch.rand(())
        dist.all_reduce(total)
        self.totals.append(total)

    def result(self) -> list[Tensor]:
        """Return the losses, and the state of the random generators."""
        return [*self.totals, torch.get_rng_state()]


def own_loader() -> DataLoader[Any]:
    """Return this rank's data, in an order that is drawn for each pass."""
    rows = torch.arange(1.0, 1 + ROWS[dist.get_rank()])
    return DataLoader(rows, batch_size=4, shuffle=True)


def made_even(loader: Iterable[Any], ends: str) -> list[Any]:
    """Return one pass of a loader, cut or padded to the common length without the other ranks."""
    counts = [-(-rows // 4) for rows in ROWS]
    steps = min(counts) if ends == "stop" else max(counts)
    batches = list(loader)
    return (batches + [PAD] * steps)[:steps]


def expected(ends: str, left: int | None) -> list[Tensor]:
    """Return the results of a plain loop over even data."""
    training = Training()
    loader = own_loader()
    for epoch in range(EPOCHS):
        for batch in made_even(loader, ends)[: left if epoch == 0 else None]:
            training.step(batch)
    return training.result()


def _led_on(loop: Any, again: Any, step: Callable[[Any], None]) -> Any:
    """Return another loop that continues from a state in the first pass."""
    for number, item in enumerate(loop, start=1):
        step(item)
        if number == LEFT:
            state = loop.state_dict()
            break
    again.load_state_dict(state)
    return again


def trained(ends: Any, way: str, then: str) -> list[Tensor]:
    """Return the results of a loop over ``EvenData``.

    Args:
        ends: See ``EvenData``.
        way: "plain", "ahead", or "task": the step is one of an overlapped loop.
        then: The end of the first pass: it is "ended", "left", or "resumed".
    """
    training = Training()
    pad = pad_with(PAD) if ends == "pad" else None

    def loop_of(even: EvenData) -> Any:
        loader = even.loader(own_loader())
        if way == "task":
            train = PipelineTask("train", lambda ctx: training.step(ctx.batch))
            return swpipe.overlap(loader, [train], pull_ahead=True)
        return swpipe.ahead(loader, torch.clone) if way == "ahead" else loader

    def step(item: Any) -> None:
        if way != "task":
            training.step(item)

    with EvenData(ends, pad=pad, timeout_s=60.0) as even:
        loop = loop_of(even)
        if then == "resumed":
            loop = _led_on(loop, loop_of(even), step)
        for epoch in range(EPOCHS):
            for number, item in enumerate(loop, start=1):
                step(item)
                if (then, epoch, number) == ("left", 0, LEFT):
                    break
    return training.result()


def differs(ends: str, way: str, then: str) -> list[int]:
    """Return the places at which results differ in a bit."""
    right = expected(ends, LEFT if then == "left" else None)
    found = trained(ends, way, then)
    if len(right) != len(found):
        return [-1, len(right), len(found)]
    return [k for k, (a, b) in enumerate(zip(right, found, strict=True)) if not torch.equal(a, b)]


@pytest.mark.parametrize(
    ("ends", "way", "then"),
    [
        ("stop", "ahead", "left"),
        ("pad", "ahead", "resumed"),
        ("pad", "task", "ended"),
        ("stop", "task", "left"),
        ("pad", "plain", "left"),
    ],
)
def test_the_numbers_are_those_of_even_data(
    two_ranks: Ranks, ends: str, way: str, then: str
) -> None:
    """Batches, sums over the ranks and random numbers are equal on both ranks, bit for bit."""
    assert two_ranks.run(differs, ends, way, then) == [[], []]


class _Threads:
    """A loader whose batches are the threads that make them."""

    def __iter__(self) -> Any:
        return (threading.get_ident() for _ in range(12))


def _made_here() -> list[int]:
    """Return how many batches of each pass this thread has made, with pulls that take no time."""
    pull_times._START_S = pull_times._QUICK_S = 3600.0
    pull_times._MANY = 2
    loop = swpipe.ahead(_Threads(), draws=True, device="cpu")
    return [[*loop].count(threading.get_ident()) for _ in range(2)]


def test_the_time_of_pulls_does_not_decide_on_several_ranks(two_ranks: Ranks) -> None:
    """The ranks agree on each pull that is ahead: all of them make the same pulls ahead."""
    assert two_ranks.run(_made_here) == [[0, 0], [0, 0]]


class _Gated:
    """A loader with some free batches; a gate blocks the others until the test opens it."""

    def __init__(self, free: int) -> None:
        self.free, self.gate, self.pulled = free, threading.Event(), threading.Event()

    def __iter__(self) -> Any:
        for k in range(9):
            if k >= self.free:
                self.pulled.set()
                assert self.gate.wait(30.0)
            yield k


def _left_apart() -> list[list[int]]:
    """Leave a pass for which one rank has asked for more steps than the other; run another pass."""
    rank = dist.get_rank()
    own = _Gated(9 if rank == 0 else 4)
    passes = []
    with EvenData(ahead=0, timeout_s=30.0) as even:
        loop = swpipe.ahead(even.loader(own), prefetch=4, draws=True)
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
    """The next pass begins at the same step on all ranks."""
    assert two_ranks.run(_left_apart) == [[[0, 1], list(range(9))]] * 2


def _leaves_while_it_waits() -> bool:
    """Leave a pass on rank 0 whose thread waits for rank 1; return whether the thread ends."""
    before, ended = {*threading.enumerate()}, True
    own = _Gated(3)
    if dist.get_rank() == 0:
        own.gate.set()
    with EvenData(ahead=0, timeout_s=60.0) as even:
        batches = iter(swpipe.ahead(even.loader(own), prefetch=4, draws=True))
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
    """Its thread ends, though the other rank does not report whether it has a batch."""
    assert two_ranks.run(_leaves_while_it_waits) == [True, True]


def _one_leaves() -> tuple[int, str]:
    """Leave the first pass on rank 0 only, after two steps."""
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
    assert "rank 1 did not answer within 5 s" in told
    assert "rank 0 began another pass before step 3 of this one" in why


def test_an_iterator_has_one_pass() -> None:
    """What was pulled ahead in a pass that was left would be missing in the next pass."""
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
    """``overlap`` pulls it ahead as it would the loader, unless it calls a pad."""
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
    """Do nothing."""
