"""Improvement of an order of a V by swapping neighbouring passes in many places at once.

The steady state of an order repeats a pattern. Moving a pass in one repetition saves no time as
long as the other repetitions stay, so that a search which moves single passes gets nowhere. Here
two neighbouring kinds of a rank's row are swapped in all places, then in each half of the places,
each quarter, and each eighth, which treats the prologue and the epilogue apart::

    row of a rank      0 1 2 4 3 5 0 1 2 4 3 5 0 1 2 4 3 5
    "43" in all        0 1 2 3 4 5 0 1 2 3 4 5 0 1 2 3 4 5
    in the last half   0 1 2 4 3 5 0 1 2 3 4 5 0 1 2 3 4 5
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations, product

from swpipe.plans.pipeline_parallel.v_order import Objective, Order, VOrders

_SWAPS = [(a + b, b + a) for a, b in permutations("012345", 2)]
"""Two neighbouring kinds (see ``v_order``), and the same in the other sequence."""

_RUNS = (1, 2, 4, 8)
"""Into how many runs the places are divided, one after the other."""


def swapped_patterns(
    orders: VOrders, objective: Objective, order: Order, moves: int
) -> tuple[Order, int]:
    """Swap patterns of an order as long as it gets better.

    Args:
        orders: The job.
        objective: The value to minimize.
        order: An order that can run.
        moves: The largest number of orders to time.

    Returns:
        An order that is valid and no worse, and the number of moves that are left.
    """
    least = orders.value(order, objective)
    for n_runs in _RUNS:
        before = None
        while least != before:
            before = least
            for rank, (pair, swapped) in product(range(orders.n_ranks), _SWAPS):
                for row in _with_swaps(order[rank], pair, swapped, n_runs):
                    if not orders.is_valid(row, rank):
                        continue
                    if moves <= 0:
                        return order, 0
                    moves -= 1
                    changed = [*order[:rank], row, *order[rank + 1 :]]
                    value = orders.value(changed, objective)
                    if value < least:
                        order = changed
                        least = value
                        break  # the other runs are those of the row as it was
    return order, moves


def _with_swaps(row: Sequence[int], pair: str, swapped: str, n_runs: int) -> Iterator[list[int]]:
    """Yield a row with one run of a pair's places swapped, for each run."""
    parts = "".join(map(str, row)).split(pair)
    n_places = len(parts) - 1
    cuts = [n_places * run // n_runs for run in range(n_runs + 1)]
    # Fewer places than runs have been swapped one by one already.
    for first, last in pairwise(cuts) if n_places >= n_runs else ():
        joints = [pair] * first + [swapped] * (last - first) + [pair] * (n_places - last) + [""]
        text = "".join(part + joint for part, joint in zip(parts, joints, strict=True))
        yield [int(kind) for kind in text]
