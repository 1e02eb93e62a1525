"""Orders of a V that need little memory, made by repeating a building block.

A building block assigns a time slot to each F and I of one microbatch. Microbatch k runs 6k slots
later, because a rank runs six passes per microbatch. In a uniform block, the slots modulo 6 change
by a constant from one rank to the next. V-Min and V-Half, the blocks that need a third and a half
of the memory of 1F1B, are uniform.

Source: P. Qi et al., "Pipeline parallelism with controllable memory" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, count, permutations
from typing import TypeAlias

from swpipe.plans.pipeline_parallel.v_order import Order, VOrders

Block: TypeAlias = tuple[tuple[int, ...], ...]
"""The slot of each F and I of the first microbatch, by rank and kind (see ``v_order``)."""


def uniform_orders(orders: VOrders) -> Iterator[Order]:
    """Yield the orders of the uniform blocks that fit the memory, without end.

    A block is repeated every six slots, then every seven, and so on, which needs less and less
    memory; for each period, the most promising block comes first. Each W comes directly after its
    I. Yields nothing if the memory suffices for 1F1B, because the published method is better there.
    """
    n = orders.n_ranks
    if orders.max_mem >= 2 * n * max(row[0] for row in orders.memory):
        return
    blocks = {*_uniform_blocks(n)}
    for period in count(6):
        repeated = (_repeated(block, period, orders.n_micro) for block in blocks)
        yield from sorted(
            (order for order in repeated if orders.fits(order)),
            key=lambda order: (orders.value(order, "makespan"), order),
        )


def _repeated(block: Block, period: int, n_micro: int) -> Order:
    """Return the order that starts a block every ``period`` slots, each W directly after its I."""
    order = []
    for slots in block:
        kinds = enumerate(slots)
        passes = sorted((slot + period * k, kind) for kind, slot in kinds for k in range(n_micro))
        order.append([p for _, kind in passes for p in ((kind,) if kind < 2 else (kind, kind + 2))])
    return order


def _uniform_blocks(n: int) -> Iterator[Block]:
    """Yield blocks in which a pass of each kind moves by a constant step from rank to rank.

    F0 and I0 move forward by ``large`` slots per rank up to the rank ``change``, and by ``small``
    slots per rank after it. F1 and I1 move back by one slot per rank. The same block may be yielded
    more than once.
    """
    for first in permutations(range(1, 6), 3):
        for small, large in combinations_with_replacement(range(1, 6), 2):
            for change in range(1, n):
                moved = [large * min(r, change) + small * max(0, r - change) for r in range(n)]
                residues = [
                    [way % 6 for way in (moved[r], first[0] - r, first[1] + moved[r], first[2] - r)]
                    for r in range(n)
                ]
                # A rank runs one pass at a time: its four kinds need different residues.
                if all(len(set(row)) == 4 for row in residues):
                    yield _earliest(residues)


def _earliest(residues: list[list[int]]) -> Block:
    """Return the earliest slots with these residues modulo 6, each pass after the one it needs."""
    block = [[0] * 4 for _ in residues]
    slot = 0
    for kind in range(4):
        ranks = range(len(residues))
        for rank in ranks if kind % 2 == 0 else reversed(ranks):
            slot += (residues[rank][kind] - slot) % 6
            block[rank][kind] = slot
            slot += 1
    return tuple(map(tuple, block))
