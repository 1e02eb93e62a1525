"""Balanced partitions: equal numbers of rows, about equal workloads."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swpipe.tasks.torchrec.balance import balanced_partition


def heaviest(workloads: Sequence[float], shares: Sequence[Sequence[int]]) -> float:
    """The largest workload of a rank."""
    return max(sum(workloads[row] for row in share) for share in shares)


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


@pytest.mark.parametrize(("parts", "rows", "most"), [(2, 6, 1.2), (3, 3, 1.2), (4, 256, 1.001)])
def test_a_skewed_partition_is_even(parts: int, rows: int, most: float) -> None:
    """Giant rows are balanced with light ones: so far above the mean, or the giant row, at most."""
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
        ([1.0, 2.0, 3.0], "3 rows cannot be divided evenly among 2 ranks"),
        ([1.0, float("nan")], "the workload of row 1 is nan"),
        ([float("inf"), 1.0], "the workload of row 0 is inf"),
    ],
)
def test_rows_that_cannot_be_divided_are_refused(workloads: list[float], says: str) -> None:
    """Uneven numbers of rows, and workloads that are not finite."""
    with pytest.raises(ValueError, match=says):
        balanced_partition(workloads, 2)
