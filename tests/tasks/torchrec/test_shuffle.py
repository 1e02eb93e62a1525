"""Batch shufflers on two ranks: equal numbers of rows, none lost, and even work."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from swpipe.tasks.torchrec.shuffling import shuffle
from swpipe.tasks.torchrec.shuffling.balance import balanced_partition
from swpipe.tasks.torchrec.shuffling.rows import Route
from swpipe.tasks.torchrec.shuffling.shuffle import (
    IdentityShuffler,
    KarmarkarKarpShuffler,
)
from tests.support.budget import examples
from tests.support.ranks import Ranks
from tests.support.sequencer import await_event

ROWS = 24


@dataclass
class Clicks:
    """A batch of a TorchRec user, in which ``ids`` identify every row."""

    ids: Tensor  # [B]
    dense: Tensor  # [B, 3]
    flags: Tensor  # [B], bool
    sparse: KeyedJaggedTensor  # keys "a" and "b"
    weighted: KeyedJaggedTensor  # key "w"
    history: JaggedTensor
    nested: dict[str, Any]
    note: str = "of the whole batch"

    def work(self) -> Tensor:
        return self.sparse.lengths().view(2, -1).sum(0)


def clicks(rank: int, rows: int = ROWS, seed: int = 0) -> Clicks:
    """Return rows whose values show the row and its original rank."""
    draws = random.Random(100 * seed + rank)
    heavy = 8 if rank == 0 else 1  # rank 0 reads the long sequences
    ids = [1000 * rank + row for row in range(rows)]
    long = [[draws.randrange(heavy * 4) for _ in ids] for _ in "ab"]
    short = [draws.randrange(3) for _ in ids]

    def jagged(lengths: list[int], times: int) -> list[int]:
        return [times * row for row, n in zip(ids, lengths, strict=True) for _ in range(n)]

    return Clicks(
        ids=torch.tensor(ids),
        dense=torch.tensor([[row, row + 0.5, -row] for row in ids]),
        flags=torch.tensor([row % 2 == 0 for row in ids]),
        sparse=KeyedJaggedTensor(
            ["a", "b"],
            torch.tensor(jagged(long[0], 2) + jagged(long[1], 3)),
            lengths=torch.tensor(long[0] + long[1], dtype=torch.int32),
        ),
        weighted=KeyedJaggedTensor(
            ["w"],
            torch.tensor(jagged(short, 5)),
            torch.tensor(jagged(short, 7), dtype=torch.float32),
            lengths=torch.tensor(short),
        ),
        history=JaggedTensor(
            torch.tensor(jagged(short, 11)).unsqueeze(1).repeat(1, 2), lengths=torch.tensor(short)
        ),
        nested={"pair": (torch.tensor(ids), None), "empty": torch.empty(rows, 0), "size": 3},
    )


def rows_of(batch: Clicks) -> dict[int, Any]:
    """Return the contents of each row as plain data, by its id."""
    a, b = (batch.sparse[key].to_dense() for key in "ab")
    w = batch.weighted["w"]
    return {
        int(row): (
            batch.dense[at].tolist(),
            bool(batch.flags[at]),
            a[at].tolist(),
            b[at].tolist(),
            w.to_dense()[at].tolist(),
            w.to_dense_weights()[at].tolist(),
            batch.history.to_dense()[at].tolist(),
            int(batch.nested["pair"][0][at]),
        )
        for at, row in enumerate(batch.ids)
    }


def _shuffle() -> list[Any]:
    """Return rows and work before and after; both shuffles start before one is finished."""
    rank = dist.get_rank()
    shuffler = KarmarkarKarpShuffler(Clicks.work)
    dealt = [clicks(rank, seed=seed) for seed in range(2)]
    tickets = [shuffler.start(batch) for batch in dealt]
    seen = []
    for batch, ticket in zip(dealt, tickets, strict=True):
        before = rows_of(batch)
        got = shuffler.finish(batch, ticket)
        assert rows_of(shuffler.finish(batch, ticket)) == rows_of(got)
        assert rows_of(batch) == before
        assert (got.note, got.nested["size"], got.nested["pair"][1]) == (batch.note, 3, None)
        assert got.nested["empty"].shape == (ROWS, 0)
        assert (got.sparse.lengths().dtype, got.flags.dtype) == (torch.int32, torch.bool)
        assert got.sparse.stride() == ROWS
        seen.append([before, rows_of(got), float(batch.work().sum()), float(got.work().sum())])
    shuffler.close()
    shuffler.close()
    return seen


def test_two_ranks_share_the_work(two_ranks: Ranks) -> None:
    """Rows per rank are equal, every row is complete and none lost; rank 0's long rows spread."""
    for seen in zip(*two_ranks.run(_shuffle), strict=True):
        befores, afters, loads, shares = zip(*seen, strict=True)
        assert [len(after) for after in afters] == [ROWS] * 2
        assert afters[0] | afters[1] == befores[0] | befores[1]
        mean = sum(loads) / 2
        assert max(loads) > 1.5 * mean
        assert max(shares) <= 1.01 * mean + 1


def _told() -> list[tuple[str, str]]:
    """Return a shuffler's errors for batches, and the words that they must have."""
    rank = dist.get_rank()
    mixed, strided, four = (clicks(rank, rows=4) for _ in range(3))
    mixed.nested["temperature"] = torch.tensor([0.5])
    strided.sparse = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
    )

    def said(batch: Clicks, workload: Callable[[Clicks], Tensor] = _ones) -> str:
        shuffler = KarmarkarKarpShuffler(workload)
        try:
            shuffler.finish(batch, shuffler.start(batch))
        except ValueError as error:
            return "\n".join([str(error), *getattr(error, "__notes__", [])])
        finally:
            shuffler.close()
        return ""

    return [
        (said(clicks(rank, rows=4 + rank)), "the ranks' batches have [4, 5] rows"),
        (said(mixed), "batch.nested.temperature has 1 rows, and the batch has 4"),
        (said(strided), "batch.sparse has another number of samples for each key"),
        (said(four, lambda batch: _ones(batch) * torch.nan), "the workload of row 0 is nan"),
        (said(four, lambda batch: batch.dense), "has shape [4, 3]: give one number per row"),
    ]


def _ones(batch: Clicks) -> Tensor:
    return torch.ones(len(batch.ids))


def _gathers() -> list[tuple[str, float]]:
    """Return the times of the gathers of two batches, the first of which is delayed."""
    seen: list[tuple[str, float]] = []
    second_has_come, first_may_end = threading.Event(), threading.Event()
    wait_for = shuffle.wait_for

    def gather(work: list[float], group: Any) -> list[list[float]]:
        seen.append(("begins", work[0]))
        if work[0] == 0:
            await_event(first_may_end, "the end of the first gather")
        else:
            second_has_come.set()
        seen.append(("ends", work[0]))
        return [work]

    def wait(futures: Any, *limit: Any, **options: Any) -> Any:
        second_has_come.set()
        return wait_for(futures, *limit, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "gather", gather)
        patch.setattr(shuffle, "wait_for", wait)
        shuffler = KarmarkarKarpShuffler(lambda batch: batch)
        tickets = [shuffler.start(torch.tensor([float(n)])) for n in range(2)]
        await_event(second_has_come, "the second batch")
        first_may_end.set()
        for ticket in tickets:
            ticket.result()
        shuffler.close()
    return seen


def test_workloads_are_gathered_in_the_order_of_the_batches(one_rank: Ranks) -> None:
    """This holds on every rank and for any speed of threads: they are collectives."""
    assert one_rank.run(_gathers) == [[("begins", 0), ("ends", 0), ("begins", 1), ("ends", 1)]]


def test_what_cannot_be_shuffled_is_told_on_all_ranks(two_ranks: Ranks) -> None:
    """Every rank gets the error, which names the value and the fix; none hangs."""
    for told in two_ranks.run(_told):
        for said, wanted in told:
            assert wanted in said


def _late_workloads() -> str:
    shuffler = KarmarkarKarpShuffler(_ones, timeout_s=1.0)
    batch = clicks(dist.get_rank(), rows=4)
    said = "did not start"
    if dist.get_rank() == 1:
        try:
            shuffler.finish(batch, shuffler.start(batch))
        except RuntimeError as error:
            said = "\n".join(error.__notes__)
    dist.barrier()
    shuffler.close()
    return said


def test_a_rank_that_sends_no_workloads_is_an_error_in_time(two_ranks: Ranks) -> None:
    """It is no hang: the other rank raises after ``timeout_s``."""
    assert "while workloads were gathered" in two_ranks.run(_late_workloads)[1]


def test_the_identity_keeps_every_row() -> None:
    """The same batch is returned."""
    shuffler = IdentityShuffler()
    batch = clicks(0)
    assert shuffler.finish(batch, shuffler.start(batch)) is batch
    shuffler.close()


def test_a_shuffler_without_a_process_group_is_refused() -> None:
    """The error is that of torch's collectives."""
    with pytest.raises(ValueError, match="call init_process_group"):
        KarmarkarKarpShuffler(_ones)


def test_a_route_says_who_gets_what() -> None:
    """Rows are counted over all ranks in a deal, and within the rank in a route."""
    route = Route.of([[0, 5, 6], [1, 2, 3], [4, 7, 8]], rank=1)
    assert route == Route(order=(2, 0, 1), sent=[1, 1, 1], received=[2, 1, 0])


# ------------------------------------------------------------------- balanced partitions


def heaviest(workloads: Sequence[float], shares: Sequence[Sequence[int]]) -> float:
    """Return the largest workload of a rank."""
    return max(sum(workloads[row] for row in share) for share in shares)


@examples("batches", 100)
@given(
    st.integers(1, 5).flatmap(
        lambda parts: st.tuples(
            st.just(parts),
            st.integers(0, 12).flatmap(
                lambda rows: st.lists(
                    st.floats(-1e3, 1e6), min_size=rows * parts, max_size=rows * parts
                )
            ),
        )
    )
)
def test_all_ranks_get_equally_many_rows_and_none_is_lost(
    case: tuple[int, list[float]],
) -> None:
    """This holds for any workloads."""
    parts, workloads = case
    shares = balanced_partition(workloads, parts)
    assert [len(share) for share in shares] == [len(workloads) // parts] * parts
    assert sorted(row for share in shares for row in share) == list(range(len(workloads)))
    assert all(share == sorted(share) for share in shares)


@pytest.mark.parametrize(("parts", "rows", "most"), [(2, 6, 1.2), (3, 3, 1.2), (4, 256, 1.001)])
def test_a_skewed_partition_is_even(parts: int, rows: int, most: float) -> None:
    """Giant rows are combined with light ones: the maximum is near the mean, or the giant row."""
    for seed in range(10):
        draws = random.Random(seed)
        workloads = [draws.lognormvariate(3.0, 1.0) for _ in range(parts * rows)]
        least = max(sum(workloads) / parts, *workloads)
        assert heaviest(workloads, balanced_partition(workloads, parts)) < most * least


def test_equal_workloads_give_a_deterministic_partition() -> None:
    """Row numbers break ties, so that all ranks compute the same partition."""
    assert balanced_partition([1.0] * 8, 2) == balanced_partition([1.0] * 8, 2)
    assert balanced_partition([], 3) == [[], [], []]


@pytest.mark.parametrize(
    ("workloads", "says"),
    [
        ([1.0, float("nan")], "the workload of row 1 is nan"),
        ([float("inf"), 1.0], "the workload of row 0 is inf"),
    ],
)
def test_workloads_that_are_not_finite_are_refused(workloads: list[float], says: str) -> None:
    """By the number of the row."""
    with pytest.raises(ValueError, match=says):
        balanced_partition(workloads, 2)
