"""Balanced partitions: equal numbers of rows, about equal workloads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swpipe.tasks.torchrec.balance import balanced_partition


def heaviest(workloads: Sequence[float], shares: Sequence[Sequence[int]]) -> float:
    """The largest workload of a rank."""
    return max(sum(workloads[row] for row in share) for share in shares)


def least_heaviest(workloads: Sequence[float], parts: int) -> float:
    """The optimum over all partitions into equal numbers of rows."""
    size = len(workloads) // parts

    def best(left: tuple[int, ...]) -> float:
        if not left:
            return 0.0
        first, *others = left
        return min(
            max(
                workloads[first] + sum(workloads[row] for row in taken),
                best(tuple(row for row in others if row not in taken)),
            )
            for taken in combinations(others, size - 1)
        )

    return best(tuple(range(len(workloads))))


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
    """Whatever the workloads are."""
    parts, workloads = case
    shares = balanced_partition(workloads, parts)
    assert [len(share) for share in shares] == [len(workloads) // parts] * parts
    assert sorted(row for share in shares for row in share) == list(range(len(workloads)))
    assert all(share == sorted(share) for share in shares)


@pytest.mark.parametrize(("parts", "rows"), [(2, 4), (2, 6), (3, 3), (4, 2)])
def test_a_small_partition_is_close_to_the_optimum(parts: int, rows: int) -> None:
    """Within 5% of the optimum on each of 30 skewed cases, within 0.5% on average."""
    over = []
    for seed in range(30):
        draws = random.Random(seed)
        workloads = [draws.lognormvariate(3.0, 1.0) for _ in range(parts * rows)]
        best = least_heaviest(workloads, parts)
        over.append(heaviest(workloads, balanced_partition(workloads, parts)) / best)
    assert max(over) < 1.05
    assert sum(over) / len(over) < 1.005


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_large_skewed_partition_is_even(parts: int) -> None:
    """Giant rows are balanced with many light ones: the maximum is within 0.1%."""
    draws = random.Random(parts)
    workloads = [draws.paretovariate(1.5) for _ in range(parts * 256)]
    mean = sum(workloads) / parts
    as_they_came = [range(at, at + 256) for at in range(0, len(workloads), 256)]
    assert heaviest(workloads, as_they_came) > 1.01 * mean
    assert heaviest(workloads, balanced_partition(workloads, parts)) < 1.001 * mean


def test_equal_workloads_give_a_deterministic_partition() -> None:
    """Row numbers break ties, so that all ranks compute the same partition."""
    assert balanced_partition([1.0] * 8, 2) == balanced_partition([1.0] * 8, 2)
    assert balanced_partition([], 3) == [[], [], []]


@pytest.mark.parametrize(
    ("workloads", "says"),
    [
        ([1.0, 2.0, 3.0], "3 rows cannot be divided evenly among 2 ranks"),
        ([1.0, float("nan")], "the workload of row 1 is nan"),
        ([float("inf"), 1.0], "the workload of row 0 is inf"),
    ],
)
def test_rows_that_cannot_be_divided_are_refused(workloads: list[float], says: str) -> None:
    """Uneven numbers of rows, and workloads that are not finite."""
    with pytest.raises(ValueError, match=says):
        balanced_partition(workloads, 2)
