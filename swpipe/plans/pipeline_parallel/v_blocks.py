"""Orders of a V that need little memory, made by repeating a building block.

A building block assigns a time slot to each F and I of one microbatch. Microbatch k runs 6k slots
later, because a rank runs six passes per microbatch. On a rank, each kind of pass (see ``v_order``)
has a list of slots in the order of the microbatches. W passes take free slots. In the prologue
(before the first I1 of rank 0) and the epilogue (after its last F0), passes move to earlier free
slots as far as their inputs and the block's memory allow. An F takes one unit of memory, which its
W frees.

V-Min and V-Half are the blocks that need a third and a half of the memory of 1F1B. In a uniform
block, the slots modulo 6 change by a constant from one rank to the next.

Source: P. Qi et al., "Pipeline parallelism with controllable memory" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, combinations_with_replacement, permutations

from swpipe.plans.pipeline_parallel.v_order import Order, VOrders

Block = tuple[tuple[int, ...], ...]
"""The slot of each pass of the first microbatch, by rank and kind."""

Slots = list[list[int]]
"""The slots of one rank, by kind and microbatch. The fifth list is W (or W0), the sixth is W1."""


def block_orders(n: int, m: int) -> tuple[Order, Order]:
    """Return the orders of V-Min and V-Half on n ranks, for m microbatches."""
    # The formulas of the paper. The gaps keep passes of different kinds out of the same slot modulo
    # 6, where they would collide for these n.
    gap = 2 if n % 3 == 0 else 0
    least = tuple((r, 2 * n - 1 - r, 2 * n + gap + r, 4 * n + gap - 1 - r) for r in range(n))
    gap = 3 if n % 2 == 0 else 0
    last = 3 * n - 2
    back = 3 * n + gap - 1
    half = tuple((2 * r, last - r, back + 2 * r, 6 * n + gap - 2 - r) for r in range(n))
    return _order(least, m), _order(half, m)


def uniform_orders(orders: VOrders) -> Iterator[Order]:
    """Yield two orders of each uniform block that fits the memory, the most promising block first.

    Yields nothing if the memory suffices for 1F1B, because the published method is better there.
    """
    # Blocks are ranked by the time of their plain repetition, without moved passes: moving the
    # passes of one block takes longer than ranking all blocks.
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
        for steady in (False, True):
            yield _order(block, orders.n_micro, steady=steady)


def _mean_memory(orders: VOrders, block: Block) -> float:
    """Return a lower bound of a block's peak memory: the mean memory of the fullest rank."""
    # By Little's law: a new microbatch every 6 slots, each of which keeps its activations at least
    # from F to I. Chunk 0 goes from F0 to I1, chunk 1 from F1 to I0.
    return max(
        memory[0] * (i1 - f0 + 1) / 6 + memory[1] * (i0 - f1 + 1) / 6
        for memory, (f0, f1, i0, i1) in zip(orders.memory, block, strict=True)
    )


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


def _repeated(block: Block, m: int) -> list[Slots]:
    return [[[first + 6 * k for k in range(m)] for first in row] for row in block]


def _order(block: Block, m: int, *, steady: bool = True) -> Order:
    """Return the order of a repeated block.

    Args:
        block: The building block.
        m: The number of microbatches.
        steady: Whether the passes of the steady state keep their slots.
    """
    # The W are placed anew after each move, since moved passes leave other slots free.
    rows = _reordered([_with_weights(row) for row in _repeated(block, m)], steady=steady)
    rows = _reordered([row[:4] for row in _squeezed(rows)])
    rows = _squeezed([_with_weights(row) for row in rows])
    return _kinds([_with_weights(row[:4], split=True) for row in rows])


def _kinds(rows: list[Slots]) -> Order:
    return [[kind for _, _, kind, _ in _events([row])] for row in rows]


def _events(rows: list[Slots]) -> list[tuple[int, int, int, int]]:
    """Return the slot, rank, kind and microbatch of each pass, sorted by slot."""
    return sorted(
        (slot, rank, kind, micro)
        for rank, row in enumerate(rows)
        for kind, slots in enumerate(row)
        for micro, slot in enumerate(slots)
    )


def _with_weights(row: Slots, *, split: bool = False) -> Slots:
    """Return a row with each W in the first free slot after its I.

    Args:
        row: The slots of the four other kinds.
        split: Whether W0 and W1 get a list each, instead of one list for both.
    """
    # Pending W wait for a free slot; W0 goes before W1.
    taken = {slot: kind for slot, _, kind, _ in _events([row])}
    weights: Slots = [[], []]
    pending = [0, 0]
    last = max(taken)
    slot = 0
    while slot <= last or any(pending):
        kind = taken.get(slot)
        if kind is None and any(pending):
            which = 0 if pending[0] else 1
            pending[which] -= 1
            weights[which].append(slot)
        elif kind is not None and kind > 1:
            pending[kind - 2 if split else 0] += 1
        slot += 1
    return [*row, *weights[: 1 + split]]


_CHANGES = (1, 1, 0, 0, -1)
"""The memory that each kind adds, in units of one F."""


def _usage(row: Slots) -> list[int]:
    """Return the memory of a row after each slot, in units of one F, with W in free slots."""
    row = row if len(row) > 4 else _with_weights(row)
    changes = [0] * (1 + max(map(max, row)))
    for slots, change in zip(row, _CHANGES, strict=True):
        for slot in slots:
            changes[slot] += change
    return [*accumulate(changes)]


def _needs(rows: list[Slots], rank: int, kind: int, micro: int) -> Iterator[int]:
    """Yield the slots of the passes that must come before a pass."""
    # W comes after the I with its number among all I of the rank. Other kinds come after the pass
    # of the neighbouring rank (down for even kinds, up for odd ones), after the kind before, and
    # after the microbatch before.
    row = rows[rank]
    near = rank - 1 if kind % 2 == 0 else rank + 1
    if kind == 4:
        yield sorted(row[2] + row[3])[micro]
    elif 0 <= near < len(rows):
        yield rows[near][kind][micro]
    if 0 < kind < 4:
        yield row[kind - 1][micro]
    if micro:
        yield row[kind][micro - 1]


def _reordered(rows: list[Slots], *, steady: bool = True) -> list[Slots]:
    """Move passes to earlier free slots, without exceeding the peak memory of the given rows.

    Rows with W move in the prologue and the epilogue, and rows without W only in the epilogue.

    Args:
        rows: The slots of each rank; they are changed.
        steady: Whether passes between the prologue and the epilogue keep their slots.
    """
    # phase: 0 in the prologue, 1 in the steady state, 2 in the epilogue.
    usage = [_usage(row) for row in rows]
    limit = max(map(max, usage))
    last = len(rows[0][0]) - 1
    phase = 0
    taken: list[set[int]] = [set() for _ in rows]
    for slot, rank, kind, micro in _events(rows):
        if (rank, kind, phase) == (0, 3, 0):
            phase = 1
        stays = (phase == 1 and steady) or (phase == 0 and len(rows[0]) == 4)
        if (kind, micro, phase) == (0, last, 1):
            phase = 2
        first = slot if stays else 1 + max([-1, *_needs(rows, rank, kind, micro)])
        # The first free slot after the inputs that keeps the memory; at the latest its own slot.
        row = rows[rank]
        for free in (at for at in range(first, slot + 1) if at not in taken[rank]):
            row[kind][micro] = free
            if len(row) == 4:  # W find other slots
                fits = free == slot or max(_usage(row)) <= limit
            else:
                fits = _CHANGES[kind] <= 0 or max(usage[rank][free:slot], default=0) < limit
            if fits:
                taken[rank].add(free)
                for at in range(free, slot):
                    usage[rank][at] += _CHANGES[kind]
                break
    return rows


def _squeezed(rows: list[Slots]) -> list[Slots]:
    """Give each pass the earliest slot that keeps the order of its rank."""
    last = [-1] * len(rows)
    for _, rank, kind, micro in _events(rows):
        needs = () if kind == 4 else _needs(rows, rank, kind, micro)
        last[rank] = 1 + max([last[rank], *needs])
        rows[rank][kind][micro] = last[rank]
    return rows
