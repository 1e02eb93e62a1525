"""Orders of a V for little memory: V-Min and V-Half, a third and a half of what 1F1B takes.

A building block has a slot for each F and I of one microbatch; microbatch k is 6k slots later. On a
rank each kind (as in ``v_order``) has a list of slots, in the order of the microbatches; W go to
free slots. Before the first I1 of rank 0 and after its last F0, passes move to earlier free slots,
as far as their inputs and the block's memory allow (an F takes one unit, which its W frees).

Source: P. Qi et al., "Pipeline parallelism with controllable memory" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator

from swpipe.plans.pipeline_parallel.v_order import Order

Slots = list[list[int]]
"""Of one rank: by kind and microbatch; the fifth list is of W, the sixth of W1."""


def block_orders(n: int, m: int) -> tuple[Order, Order]:
    """V-Min and V-Half on n ranks, for m microbatches."""
    gap = 2 if n % 3 == 0 else 0
    least = [[r, 2 * n - 1 - r, 2 * n + gap + r, 4 * n + gap - 1 - r] for r in range(n)]
    gap = 3 if n % 2 == 0 else 0
    last, back = 3 * n - 2, 3 * n + gap - 1
    half = [[2 * r, last - r, back + 2 * r, 6 * n + gap - 2 - r] for r in range(n)]
    return _order(least, m), _order(half, m)


def _order(block: list[list[int]], m: int) -> Order:
    rows = [[[first + 6 * k for k in range(m)] for first in row] for row in block]
    rows = _squeezed(_reordered([_with_weights(row) for row in rows]))
    rows = _reordered([row[:4] for row in rows])
    rows = _squeezed([_with_weights(row) for row in rows])
    rows = [_with_weights(row[:4], split=True) for row in rows]
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


def _reordered(rows: list[Slots]) -> list[Slots]:
    """Passes in earlier slots: with W at the beginning and the end, without at the end alone."""
    limit, last, phase = max(map(_peak, rows)), len(rows[0][0]) - 1, 0
    taken: list[set[int]] = [set() for _ in rows]
    for slot, rank, kind, micro in _events(rows):
        if (rank, kind, phase) == (0, 3, 0):
            phase = 1
        stays = phase == 1 or (phase == 0 and len(rows[0]) == 4)
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
