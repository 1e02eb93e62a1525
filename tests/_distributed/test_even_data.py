"""Ranks whose data ends at different steps: the same steps on all, no batch lost, never a hang."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe._distributed.even_data import _BEGINS, _ENDED, _HAS
from swpipe.loops import (
    EvenData,
    RankDataError,
    pad_with,
    pad_with_last,
)
from tests.support.pairs import pairwise_cases
from tests.support.ranks import RankDied, Ranks

LENGTHS = [(5, 3), (3, 5), (0, 4), (4, 0), (0, 0), (4, 4)]


def exchange(ctx: IterContext) -> None:
    """Run a task's collective: sum the batches of all ranks."""
    ctx.total = torch.tensor(float(ctx.batch))
    dist.all_reduce(ctx.total)


def train(ctx: IterContext) -> None:
    """Run a second collective."""
    ctx.loss = ctx.total.clone()
    dist.all_reduce(ctx.loss)


def tasks() -> list[PipelineTask]:
    return [PipelineTask("exchange", exchange), PipelineTask("train", train)]


def plan_of(kind: str) -> PipelinePlan:
    """Return a plan of the same tasks: serial, or with collectives in two thread groups."""
    if kind == "serial":
        return PipelinePlan.serial(tasks())
    return PipelinePlan(
        {
            "exchange": TaskSchedule(stage=0, thread_group="dist", globally_ordered=True),
            "train": TaskSchedule(stage=1, globally_ordered=True),
        },
        deps=[("train", "exchange")],
        pipeline_depth=3,
    )


class Went(NamedTuple):
    """The results of one rank."""

    totals: list[float]
    steps: int
    padded: int
    rest: list[int]


def _epochs(ends: Any, lengths: Sequence[tuple[int, int]], ahead: int, kind: str) -> list[Went]:
    """Run epochs over data of these lengths: 1, 2, ... on rank 0, and 100, 200, ... on rank 1."""
    rank = dist.get_rank()
    went = []
    pad = pad_with(7) if ends == "pad" else None
    with (
        EvenData(ends, pad=pad, ahead=ahead, timeout_s=30.0) as even,
        SWPipeline(plan_of(kind), tasks(), device="cpu", stall_timeout_s=60.0) as pipe,
    ):
        for both in lengths:
            own = range(1, both[rank] + 1) if rank == 0 else range(100, 100 * both[rank] + 1, 100)
            batches = even.over(own)
            totals = [float(ctx.loss) for ctx in pipe.iterate(batches)]
            went.append(Went(totals, batches.steps, batches.padded, list(batches.rest())))
    return went


def expected(ends: str, lengths: tuple[int, int], rank: int) -> Went:
    """Return the results that the documentation promises."""
    own = [[k + 1 for k in range(lengths[0])], [100 * (k + 1) for k in range(lengths[1])]]
    steps = min(lengths) if ends == "stop" else max(lengths)
    given = [(batches + [7] * steps)[:steps] for batches in own]
    totals = [2.0 * (a + b) for a, b in zip(*given, strict=True)]
    return Went(totals, steps, max(0, steps - lengths[rank]), own[rank][steps:])


@pytest.mark.parametrize(
    ("ends", "ahead", "kind"),
    pairwise_cases(("stop", "pad"), (0, 1, 4), ("serial", "pipelined")),
)
def test_all_ranks_do_the_same_steps(two_ranks: Ranks, ends: str, ahead: int, kind: str) -> None:
    """Epochs of all lengths follow each other: the same sums, the right rest, no hang."""
    went = two_ranks.run(_epochs, ends, LENGTHS, ahead, kind)
    for rank in range(2):
        assert went[rank] == [expected(ends, lengths, rank) for lengths in LENGTHS]


def _pulls(ahead: int) -> list[int]:
    """Return how many batches have been pulled at the time when each batch is returned."""
    pulled = itertools.count()
    count = 0

    def source() -> Iterator[int]:
        nonlocal count
        for k in range(6):
            count = next(pulled) + 1
            yield k

    with EvenData(ahead=ahead) as even:
        return [count for _ in even.over(source())]


def test_no_more_is_pulled_than_was_asked_for(two_ranks: Ranks) -> None:
    """Two batches lie between the one that is pulled and the one that is given."""
    assert two_ranks.run(_pulls, 2) == [[3, 4, 5, 6, 6, 6]] * 2


def _last_at_zero(length: int) -> list[Any]:
    """Run with one batch on rank 0 and ``length`` batches on rank 1."""
    own = 1 if dist.get_rank() == 0 else length
    batches = [SimpleNamespace(x=k, weights=torch.ones(2)) for k in range(own)]
    with EvenData("pad", pad=pad_with_last("weights")) as even:
        given = [(batch.x, batch.weights.tolist()) for batch in even.over(batches)]
    return [given, batches[0].weights.tolist()]


def test_the_last_batch_comes_again_at_zero_weight(two_ranks: Ranks) -> None:
    """The batch that the weights were taken from is left as it was."""
    padded, own = two_ranks.run(_last_at_zero, 3)
    assert padded == [[(0, [1.0, 1.0]), (0, [0.0, 0.0]), (0, [0.0, 0.0])], [1.0, 1.0]]
    assert own[0] == [(0, [1.0, 1.0]), (1, [1.0, 1.0]), (2, [1.0, 1.0])]


def _told(
    own: Iterable[Any], pad_name: str | None = None, timeout_s: float = 30.0, step_s: float = 0.0
) -> tuple[int, str, str]:
    """Return the number of steps that began, and the type and text of the error."""
    given = 0
    pad = None if pad_name is None else pad_with_last(pad_name)
    even = EvenData("stop" if pad is None else "pad", pad=pad, ahead=2, timeout_s=timeout_s)
    try:
        for _ in even.over(own):
            given += 1
            time.sleep(step_s)
    except Exception as error:  # noqa: BLE001 - what the test looks at
        return given, type(error).__name__, str(error)
    return given, "", ""


def _broken(after: int) -> Iterator[int]:
    yield from range(after)
    raise OSError("disk on fire")


def _one_loader_fails(after: int) -> tuple[int, str, str]:
    return _told(_broken(after) if dist.get_rank() == 1 else range(100))


@pytest.mark.parametrize("after", [0, 5])
def test_a_loader_that_fails_ends_all_ranks_at_its_step(two_ranks: Ranks, after: int) -> None:
    """The failing rank raises the error itself, the others name that rank; none waits."""
    other, own = two_ranks.run(_one_loader_fails, after)
    assert own == (after, "OSError", "disk on fire")
    assert other[:2] == (after, "RankDataError")
    assert f"the data of rank 1 failed at step {after}" in other[2]


def _nothing_to_repeat(length: int) -> tuple[int, str, str]:
    return _told([] if dist.get_rank() == 0 else [{"w": torch.ones(1)}] * length, "w")


def test_a_rank_without_any_batch_has_none_to_repeat(two_ranks: Ranks) -> None:
    """All ranks raise before the first step, unless none has data."""
    own, other = two_ranks.run(_nothing_to_repeat, 2)
    assert own[:2] == (0, "ValueError")
    assert "this rank has had no batch" in own[2]
    assert other[:2] == (0, "RankDataError")
    assert two_ranks.run(_nothing_to_repeat, 0) == [(0, "", "")] * 2


PATIENCE_S = 3.0
"""Longer than a busy machine delays a rank that is ready."""


def _one_stalls() -> tuple[int, str, str, float]:
    """Let rank 1 pull its second batch only after rank 0 has timed out."""
    dist.barrier()
    if dist.get_rank() == 0:
        begin_s = time.monotonic()
        # The step takes a while: gloo's clock, which began at the pull, is ahead of ours then.
        told = _told(range(100), timeout_s=PATIENCE_S, step_s=1.0)
        after_s = time.monotonic() - begin_s
        dist.barrier()
        return (*told, after_s)

    def stalls() -> Iterator[int]:
        yield 0
        dist.barrier()

    even = EvenData("stop", ahead=0)
    next(batches := even.over(stalls()))
    try:
        next(batches)
    except (RankDataError, StopIteration):
        return 1, "", "", 0.0
    return 0, "", "", 0.0


@pytest.fixture(scope="module", name="spare_ranks")
def ranks_of_this_module() -> Iterator[Ranks]:
    """Two ranks of this module's own, since one is late in a test and one ends in another."""
    with Ranks(2) as ranks:
        yield ranks


def test_a_rank_that_stalls_is_an_error_within_the_deadline(spare_ranks: Ranks) -> None:
    """The others say which step they wait for, after ``timeout_s``."""
    given, kind, text, after_s = spare_ranks.run(_one_stalls)[0]
    assert kind == "OutOfStepError"
    assert (
        f"rank 1 did not answer within {PATIENCE_S:g} s (timeout_s) whether it has a batch" in text
    )
    assert given <= 1
    assert PATIENCE_S <= after_s < PATIENCE_S + 20.0


def _one_dies() -> None:
    even = EvenData(ahead=0, timeout_s=60.0)
    for step in even.over(range(10)):
        if dist.get_rank() == 1 and step == 3:
            os._exit(9)


def test_a_rank_that_dies_is_an_error_at_once(spare_ranks: Ranks) -> None:
    """The others raise before the timeout."""
    with pytest.raises(RankDied) as caught:
        spare_ranks.run(_one_dies)
    assert "rank 0 failed" in caught.value.__notes__[0]
    assert "another rank ended before it answered" in caught.value.__notes__[0]
    assert "for step 4" in caught.value.__notes__[0]


def test_one_process_alone_is_one_rank() -> None:
    """Without torch.distributed, the data is not changed."""
    with EvenData(ahead=3) as even:
        batches = even.over([None, 1, None])
        assert list(batches) == [None, 1, None]
        assert list(batches) == []
        assert list(batches.rest()) == []


def test_an_iterator_that_resets_itself_still_ends() -> None:
    """The first StopIteration is the end."""

    class Resets:
        def __init__(self) -> None:
            self.left = 2

        def __iter__(self) -> Resets:
            return self

        def __next__(self) -> int:
            self.left -= 1
            if self.left < 0:
                self.left = 2
                raise StopIteration
            return self.left

    assert list(EvenData(ahead=5).over(Resets())) == [1, 0]


def test_the_rest_is_asked_for_at_the_end() -> None:
    """An earlier call is an error, since steps are still to come."""
    batches = EvenData().over([1, 2])
    next(batches)
    with pytest.raises(RuntimeError, match="the pass has not ended"):
        batches.rest()


class BesideAnother(EvenData):
    """An agreement of two ranks, the second of which is simulated and has ``other`` batches."""

    def __init__(self, ends: Any, other: int, **options: Any) -> None:
        super().__init__(ends, **options)
        self.size = 2
        self._others = itertools.chain([_BEGINS], [_HAS] * other, itertools.repeat(_ENDED))

    def exchange_status(self, status: int) -> tuple[torch.Tensor, None]:
        return torch.tensor([status, next(self._others)], dtype=torch.int32), None


class Again:
    """An iterator of two batches that restarts after its end."""

    def __init__(self) -> None:
        self.calls = 0

    def __iter__(self) -> Again:
        return self

    def __next__(self) -> int:
        self.calls += 1
        if self.calls % 3 == 0:
            raise StopIteration
        return self.calls


def test_a_rank_that_pads_asks_its_data_no_more() -> None:
    """An iterator that begins again would give batches of another pass instead of padding."""
    data = Again()
    found = BesideAnother("pad", 5, pad=pad_with("pad")).over(data)
    assert [*found] == [1, 2, "pad", "pad", "pad"]
    assert data.calls == 3
    assert (found.steps, found.padded) == (5, 3)


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_the_batch_that_comes_again_has_no_weight_and_is_another_object(kind: Any) -> None:
    """This holds for weights in an item and in an attribute."""
    last = kind(x=torch.ones(2), w=torch.ones(2))
    again = pad_with_last("w")(last)
    here, there = (one if kind is dict else vars(one) for one in (last, again))
    assert here["w"].tolist() == [1, 1]
    assert there["w"].tolist() == [0, 0]
    assert there["x"] is here["x"]
