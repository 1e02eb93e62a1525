"""Orders of a V for little memory, made by repeating a building block.

A building block has a slot for each F and I of one microbatch; microbatch k is 6k slots later. On a
rank each kind (as in ``v_order``) has a list of slots, in the order of the microbatches; W go to
free slots. Before the first I1 of rank 0 and after its last F0, passes move to earlier free slots,
as far as their inputs and the block's memory allow (an F takes one unit, which its W frees).

V-Min and V-Half are the blocks that need a third and a half of the memory of 1F1B. In a uniform
block, the slots modulo 6 move by a constant from one rank to the next.

Source: P. Qi et al., "Pipeline parallelism with controllable memory" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, permutations

from swpipe.plans.pipeline_parallel.v_order import Order, VOrders

Block = tuple[tuple[int, ...], ...]
"""By rank and kind, the slot of the first microbatch."""

Slots = list[list[int]]
"""Of one rank: by kind and microbatch; the fifth list is of W, the sixth of W1."""


def block_orders(n: int, m: int) -> tuple[Order, Order]:
    """Return V-Min and V-Half on n ranks, for m microbatches."""
    gap = 2 if n % 3 == 0 else 0
    least = tuple((r, 2 * n - 1 - r, 2 * n + gap + r, 4 * n + gap - 1 - r) for r in range(n))
    gap = 3 if n % 2 == 0 else 0
    last, back = 3 * n - 2, 3 * n + gap - 1
    half = tuple((2 * r, last - r, back + 2 * r, 6 * n + gap - 2 - r) for r in range(n))
    return _order(least, m), _order(half, m)


def uniform_orders(orders: VOrders) -> Iterator[Order]:
    """Yield the order of each uniform block that fits the memory, the most promising one first.

    Blocks are ranked by the time of their plain repetition: moving the passes of one block takes
    longer than ranking all of them. With the memory of 1F1B there are none, since the published
    method is better there.
    """
    n = orders.n_ranks
    if orders.max_mem >= 2 * n * max(row[0] for row in orders.memory):
        return
    ranked = []
    blocks = {*_uniform_blocks(n)}
    for block in (block for block in blocks if _mean_memory(orders, block) <= orders.max_mem):
        rows = [_with_weights(row, split=True) for row in _repeated(block, orders.n_micro)]
        order = _kinds(rows)
        times = orders.times(order) if orders.fits(order) else None
        if times is not None:
            ranked.append((times.value("makespan"), block))
    for _, block in sorted(ranked):
        yield _order(block, orders.n_micro, steady=False)


def _mean_memory(orders: VOrders, block: Block) -> float:
    """Return the mean memory from F to I on the fullest rank, which the peak cannot be below."""
    return max(
        memory[0] * (i1 - f0 + 1) / 6 + memory[1] * (i0 - f1 + 1) / 6
        for memory, (f0, f1, i0, i1) in zip(orders.memory, block, strict=True)
    )


def _uniform_blocks(n: int) -> Iterator[Block]:
    """Yield blocks in which a pass of each kind moves by a constant step from rank to rank.

    F0 and I0 move by ``large`` slots up to the rank ``change``, and by ``small`` slots after it; F1
    and I1 go the other way by one slot. A block may come up more than once.
    """
    for first in permutations(range(1, 6), 3):
        for small, large in combinations_with_replacement(range(1, 6), 2):
            for change in range(1, n):
                moved = [large * min(r, change) + small * max(0, r - change) for r in range(n)]
                residues = [
                    [way % 6 for way in (moved[r], first[0] - r, first[1] + moved[r], first[2] - r)]
                    for r in range(n)
                ]
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


def _repeated(block: Block, m: int) -> list[Slots]:
    return [[[first + 6 * k for k in range(m)] for first in row] for row in block]


def _order(block: Block, m: int, *, steady: bool = True) -> Order:
    """Return the order of a repeated block; unless ``steady``, passes may move in between."""
    rows = _reordered([_with_weights(row) for row in _repeated(block, m)], steady=steady)
    rows = _reordered([row[:4] for row in _squeezed(rows)])
    rows = _squeezed([_with_weights(row) for row in rows])
    return _kinds([_with_weights(row[:4], split=True) for row in rows])


def _kinds(rows: list[Slots]) -> Order:
    return [[kind for _, _, kind, _ in _events([row])] for row in rows]


def _events(rows: list[Slots]) -> list[tuple[int, int, int, int]]:
    """Slot, rank, kind and microbatch of each pass, in the order of the slots."""
    return sorted(
        (slot, rank, kind, micro)
        for rank, row in enumerate(rows)
        for kind, slots in enumerate(row)
        for micro, slot in enumerate(slots)
    )


def _with_weights(row: Slots, *, split: bool = False) -> Slots:
    """The row with W in free slots: of both chunks in one list, or of each in its own."""
    taken = {slot: kind for slot, _, kind, _ in _events([row])}
    found: Slots = [[], []]
    pending, slot = [0, 0], 0
    while slot <= max(taken) or any(pending):
        kind = taken.get(slot)
        if kind is None and any(pending):
            which = 0 if pending[0] else 1
            pending[which] -= 1
            found[which].append(slot)
        elif kind is not None and kind > 1:
            pending[kind - 2 if split else 0] += 1
        slot += 1
    return [*row, *found[: 1 + split]]


def _peak(row: Slots) -> int:
    """The most memory, where W are in free slots."""
    used = peak = 0
    for _, _, kind, _ in _events([row if len(row) > 4 else _with_weights(row)]):
        used += (1, 1, 0, 0, -1)[kind]
        peak = max(peak, used)
    return peak


def _needs(rows: list[Slots], rank: int, kind: int, micro: int) -> Iterator[int]:
    """The slots of what a pass comes after."""
    row, near = rows[rank], rank - 1 if kind % 2 == 0 else rank + 1
    if kind == 4:
        yield sorted(row[2] + row[3])[micro]
    elif 0 <= near < len(rows):
        yield rows[near][kind][micro]
    if 0 < kind < 4:
        yield row[kind - 1][micro]
    if micro:
        yield row[kind][micro - 1]


def _reordered(rows: list[Slots], *, steady: bool = True) -> list[Slots]:
    """Move passes to earlier slots: with W at the beginning and the end, without at the end alone.

    Unless ``steady``, rows with W move in between, too.
    """
    limit, last, phase = max(map(_peak, rows)), len(rows[0][0]) - 1, 0
    taken: list[set[int]] = [set() for _ in rows]
    for slot, rank, kind, micro in _events(rows):
        if (rank, kind, phase) == (0, 3, 0):
            phase = 1
        stays = (phase == 1 and steady) or (phase == 0 and len(rows[0]) == 4)
        if (kind, micro, phase) == (0, last, 1):
            phase = 2
        first = slot if stays else 1 + max([-1, *_needs(rows, rank, kind, micro)])
        for free in (one for one in range(first, slot + 1) if one not in taken[rank]):
            rows[rank][kind][micro] = free
            if free == slot or _peak(rows[rank]) <= limit:
                taken[rank].add(free)
                break
    return rows


def _squeezed(rows: list[Slots]) -> list[Slots]:
    """The same order, each pass as early as it can be."""
    last = [-1] * len(rows)
    for _, rank, kind, micro in _events(rows):
        needs = () if kind == 4 else _needs(rows, rank, kind, micro)
        rows[rank][kind][micro] = last[rank] = 1 + max([last[rank], *needs])
    return rows
