"""Rows dealt to ranks so that each gets equally many of them, and about equally much work.

The balanced largest-differencing method, after Karmarkar and Karp: rows are sorted by workload and
cut into tuples of one row per rank, the heaviest first. Each tuple is a small deal of its own, with
a *spread*: its heaviest share less its lightest. The two deals with the largest spreads are laid on
top of each other, heavy shares on light ones, again and again until one is left. Every share grows
by one row with each tuple, so all end up with equally many.

A tuple holds rows of much the same workload, so this cannot set one giant row off against many
light ones. What it leaves uneven, swaps of single rows even out: the heaviest share gives a row to
another one for a lighter row, as long as that lowers the heavier of the two.

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
"""Shares that differ by less than this part of the mean are not swapped any further."""

SWAPS_PER_SHARE = 32
"""At most; each halves a gap as a rule, so few are needed."""


class _Share(NamedTuple):
    work: float
    rows: list[int]


def balanced_partition(workloads: Sequence[float], parts: int) -> list[list[int]]:
    """Deal rows to ``parts`` shares of equally many rows.

    The result depends on the arguments alone: ranks that call with the same ones agree.

    Args:
        workloads: Of each row; finite, in any unit.
        parts: How many shares, at least 1.

    Returns:
        The rows of each share, counted from 0, ascending.

    Raises:
        ValueError: The rows cannot be dealt evenly, or a workload is not finite.
    """
    if parts < 1 or len(workloads) % parts:
        raise ValueError(
            f"{len(workloads)} rows cannot be dealt evenly to {parts} ranks: give every rank "
            "equally many rows (a loader's drop_last=True does)"
        )
    for row, work in enumerate(workloads):
        if not math.isfinite(work):
            raise ValueError(f"the workload of row {row} is {work}: workloads must be finite")
    heaviest_first = sorted(range(len(workloads)), key=lambda row: (-workloads[row], row))
    if not heaviest_first:
        return [[] for _ in range(parts)]
    # (-spread, age, shares from heavy to light): the widest deal first, the older of equals.
    deals = [
        _deal([_Share(workloads[row], [row]) for row in heaviest_first[at : at + parts]], age)
        for age, at in enumerate(range(0, len(heaviest_first), parts))
    ]
    heapq.heapify(deals)
    age = len(deals)
    while len(deals) > 1:
        _, _, wide = heapq.heappop(deals)
        _, _, narrow = heapq.heappop(deals)
        heapq.heappush(deals, _deal(list(map(_join, wide, reversed(narrow))), age))
        age += 1
    rows = torch.tensor([share.rows for share in deals[0][2]])
    evened = _even_out(torch.tensor(workloads, dtype=torch.float64), rows)
    return [sorted(share) for share in evened.tolist()]


def _deal(shares: list[_Share], age: int) -> tuple[float, int, list[_Share]]:
    shares.sort(key=lambda share: -share.work)
    return shares[-1].work - shares[0].work, age, shares


def _join(one: _Share, other: _Share) -> _Share:
    few, many = sorted((one.rows, other.rows), key=len)
    many.extend(few)  # the shorter into the longer: no row is moved more than log2(rows) times
    return _Share(one.work + other.work, many)


def _even_out(work: Tensor, rows: Tensor) -> Tensor:
    """Swap rows between shares; ``rows`` is [parts, rows of a share]."""
    totals = work[rows].sum(1)
    for _ in range(SWAPS_PER_SHARE * len(rows)):
        light_first = torch.argsort(totals, stable=True).tolist()
        heavy = light_first.pop()
        for light in light_first:
            gap = float(totals[heavy] - totals[light])
            if gap <= EVEN * abs(float(totals.mean())):
                return rows
            if (pair := _best_swap(work[rows[heavy]], work[rows[light]], gap)) is not None:
                here, there = pair
                given, taken = rows[heavy, here].clone(), rows[light, there].clone()
                rows[heavy, here], rows[light, there] = taken, given
                totals = work[rows].sum(1)
                break
        else:
            return rows
    return rows


def _best_swap(heavy: Tensor, light: Tensor, gap: float) -> tuple[int, int] | None:
    """The pair of rows whose swap comes closest to halving ``gap``; None where none narrows it."""
    ascending, places = light.sort()
    at = torch.searchsorted(ascending, heavy - gap / 2).clamp(max=len(light) - 1)
    near = torch.stack([at, (at - 1).clamp(min=0)])
    moved = heavy - ascending[near]
    side, here = divmod(int((moved - gap / 2).abs().argmin()), len(heavy))
    if not 0 < float(moved[side, here]) < gap:
        return None
    return here, int(places[near[side, here]])
