"""Balanced partition: every rank gets the same number of rows and about the same workload.

The method is the balanced largest-differencing method, after Karmarkar and Karp. Rows are sorted by
workload and cut into tuples of one row per rank. Each tuple is a partition with a *spread*, its
largest share minus its smallest. The two partitions with the largest spreads are merged, large
shares with small ones, until one partition is left.

A tuple has rows of similar workload, so one giant row is not balanced against many small ones.
Therefore the largest share then swaps single rows for lighter rows of another share, as long as
this lowers the larger of the two shares.

Sources: N. Karmarkar and R. M. Karp, "The differencing method of set partitioning", 1982; W.
Michiels, J. Korst, E. Aarts and J. van Leeuwen, "Performance ratios for the differencing method
applied to the balanced number partitioning problem", STACS 2003.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

EVEN = 1e-3
"""The fraction of the mean share below which a difference of shares ends the swapping."""

SWAPS_PER_SHARE = 32
"""An upper limit of swaps per share: a swap usually halves a gap, so few are needed."""


class _Share(NamedTuple):
    work: float
    rows: list[int]


def balanced_partition(workloads: Sequence[float], parts: int) -> list[list[int]]:
    """Return the rows of each of ``parts`` shares, ascending, counted from 0; deterministic.

    The number of rows must be a multiple of ``parts``.

    Raises:
        ValueError: A workload is not finite.
    """
    for row, work in enumerate(workloads):
        if not math.isfinite(work):
            raise ValueError(f"the workload of row {row} is {work}: workloads must be finite")
    # Ties are broken by row number: every rank computes the partition, and all must agree.
    heaviest_first = sorted(range(len(workloads)), key=lambda row: (-workloads[row], row))
    if not heaviest_first:
        return [[] for _ in range(parts)]
    # Heap entries (-spread, age, shares from large to small): the largest spread comes first, and
    # of equal spreads the older partition.
    partitions = [
        _partition([_Share(workloads[row], [row]) for row in heaviest_first[at : at + parts]], age)
        for age, at in enumerate(range(0, len(heaviest_first), parts))
    ]
    heapq.heapify(partitions)
    age = len(partitions)
    while len(partitions) > 1:
        _, _, wide = heapq.heappop(partitions)
        _, _, narrow = heapq.heappop(partitions)
        heapq.heappush(partitions, _partition(list(map(_join, wide, reversed(narrow))), age))
        age += 1
    rows = torch.tensor([share.rows for share in partitions[0][2]])
    evened = _even_out(torch.tensor(workloads, dtype=torch.float64), rows)
    return [sorted(share) for share in evened.tolist()]


def _partition(shares: list[_Share], age: int) -> tuple[float, int, list[_Share]]:
    shares.sort(key=lambda share: -share.work)
    return shares[-1].work - shares[0].work, age, shares


def _join(share: _Share, other: _Share) -> _Share:
    few, many = sorted((share.rows, other.rows), key=len)
    # The shorter list goes into the longer, so each row moves at most log2(rows) times.
    many.extend(few)
    return _Share(share.work + other.work, many)


def _even_out(work: Tensor, rows: Tensor) -> Tensor:
    """Swap rows between shares to even out workloads; ``rows`` is [parts, rows of a share]."""
    for _ in range(SWAPS_PER_SHARE * len(rows)):
        totals = work[rows].sum(1)
        light_first = torch.argsort(totals, stable=True).tolist()
        heavy = light_first.pop()
        for light in light_first:
            gap = float(totals[heavy] - totals[light])
            if gap <= EVEN * abs(float(totals.mean())):
                return rows
            if (pair := _best_swap(work[rows[heavy]], work[rows[light]], gap)) is not None:
                here, there = pair
                # Lists as indices make a copy of the rows on the right, before they are replaced.
                rows[[heavy, light], [here, there]] = rows[[light, heavy], [there, here]]
                break
        else:
            return rows
    return rows


def _best_swap(heavy: Tensor, light: Tensor, gap: float) -> tuple[int, int] | None:
    """Return the two rows whose swap comes closest to halving ``gap``; None if none helps."""
    ascending, places = light.sort()
    # Moving workload w from the heavy to the light share changes the gap by 2w, so the ideal is w =
    # gap / 2. For each heavy row, the two light rows around that difference are candidates.
    at = torch.searchsorted(ascending, heavy - gap / 2).clamp(max=len(light) - 1)
    near = torch.stack([at, (at - 1).clamp(min=0)])
    moved = heavy - ascending[near]
    side, here = divmod(int((moved - gap / 2).abs().argmin()), len(heavy))
    if not 0 < float(moved[side, here]) < gap:
        return None
    return here, int(places[near[side, here]])
