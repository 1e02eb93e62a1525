"""Exchange of a batch's rows with the ranks that a partition assigns them to.

There is one exchange for all dense tensors and all lengths of jagged tensors, packed as bytes per
row, and one exchange for the values of each jagged tensor.

    [B, ...] tensors, [B, keys] lengths ──> bytes [B, width] ──all-to-all──> the new rows
    values, weights of a jagged tensor  ──> by row, then key ──all-to-all──> by key, then row

Rows arrive ordered by rank, and within a rank in their original order.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from swpipe.tasks.torchrec._torchrec import JaggedTensor, KeyedJaggedTensor

Group: TypeAlias = "dist.ProcessGroup | None"
"""A group of torch.distributed; None is the default group."""


@dataclass(frozen=True, slots=True)
class Route:
    """The destinations of this rank's rows.

    ``order`` are this rank's rows, from 0, in the order in which they are sent. ``sent`` and
    ``received`` are the numbers of rows for and from each rank.
    """

    order: tuple[int, ...]
    sent: list[int]
    received: list[int]

    @classmethod
    def of(cls, shares: Sequence[Sequence[int]], rank: int) -> Route:
        """Return the route of one rank, given the rows for each rank.

        Row r of rank k has the number k x (rows per rank) + r.
        """
        size = len(shares[rank])
        mine = [[row % size for row in share if row // size == rank] for share in shares]
        homes = [row // size for row in shares[rank]]
        return cls(
            tuple(row for rows in mine for row in rows),
            [len(rows) for rows in mine],
            [homes.count(home) for home in range(len(shares))],
        )


def exchange_rows(batch: Any, route: Route, group: Group = None) -> Any:
    """Return the batch of this rank's new rows; a collective of the group.

    ``batch`` has tensors of B rows, ``KeyedJaggedTensor`` and ``JaggedTensor`` of B samples, alone
    or in dataclasses, other objects with ``record_stream``, mappings, lists and tuples. It is not
    modified; other values are passed on. The group's backend must support its device.

    Raises:
        ValueError: A tensor of the batch has a different number of rows.
    """
    # The first walk collects the tensors, in a fixed order; the second one puts the new tensors in
    # their places, in the same order.
    parts: list[Any] = []
    rows = len(route.order)
    _mapped(batch, "batch", rows, parts.append)
    if not parts:
        return batch
    columns = [part if isinstance(part, Tensor) else _lengths(part) for part in parts]
    order = torch.tensor(route.order, dtype=torch.int64, device=columns[0].device)
    # Columns of all types are exchanged as one table of bytes, which takes one collective.
    widths = [column.element_size() * math.prod(column.shape[1:]) for column in columns]
    as_bytes = [
        column.detach().contiguous().flatten().view(torch.uint8).view(rows, width)
        for column, width in zip(columns, widths, strict=True)
    ]
    table = torch.cat(as_bytes, dim=1)[order]
    arrived = torch.split(_all_to_all(table, route.sent, route.received, group), widths, dim=1)

    def fresh() -> Iterator[Any]:
        for part, column, new in zip(parts, columns, arrived, strict=True):
            own = new.clone().flatten().view(column.dtype).view(column.shape)
            if isinstance(part, Tensor):
                yield own
            else:
                yield _exchange_jagged(part, own, order, route, group)

    pieces = fresh()
    return _mapped(batch, "batch", rows, lambda _: next(pieces))


def _lengths(jagged: JaggedTensor | KeyedJaggedTensor) -> Tensor:
    """Return the lengths as [B, keys]."""
    keys = len(jagged.keys()) if isinstance(jagged, KeyedJaggedTensor) else 1
    lengths: Tensor = jagged.lengths()
    return lengths.view(keys, -1).t().contiguous()


def _exchange_jagged(
    jagged: JaggedTensor | KeyedJaggedTensor,
    lengths: Tensor,
    order: Tensor,
    route: Route,
    group: Group,
) -> JaggedTensor | KeyedJaggedTensor:
    """Exchange the values; return the tensor of the new rows, with these lengths [B, keys]."""
    sent = torch.split(_lengths(jagged).sum(1)[order], route.sent)
    received = torch.split(lengths.sum(1), route.received)
    # The sizes of the exchange are needed on the host. One copy for both directions waits once.
    counts = torch.stack([rows.sum() for rows in (*sent, *received)]).tolist()
    counts_out = counts[: len(sent)]
    counts_in = counts[len(sent) :]
    # Values lie by key, then row. For the exchange they are ordered by row, so that each rank's
    # rows are contiguous, and on arrival they are ordered by key again.
    rows, keys = lengths.shape
    by_key = torch.arange(lengths.numel(), device=lengths.device).view(keys, rows)
    outward = _segments(jagged.lengths(), by_key[:, order].t())
    inward = _segments(lengths.flatten(), by_key.view(rows, keys).t())

    def move(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return _all_to_all(values[outward], counts_out, counts_in, group)[inward]

    values = move(jagged.values())
    weights = move(jagged.weights_or_none())
    lengths = lengths.t().flatten()
    if isinstance(jagged, JaggedTensor):
        return JaggedTensor(values, weights, lengths=lengths)
    return KeyedJaggedTensor(jagged.keys(), values, weights, lengths=lengths, stride=rows)


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    fresh = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(fresh, rows.contiguous(), received, sent, group=group)
    return fresh


def _segments(lengths: Tensor, order: Tensor) -> Tensor:
    """Return the indices of the values of segments, in a new order of the segments."""
    order = order.flatten()
    starts = (lengths.cumsum(0) - lengths)[order]
    taken = lengths[order]
    # The values of each segment are consecutive, so within a segment the difference between the old
    # and the new index is constant.
    before = taken.cumsum(0) - taken
    shift = torch.repeat_interleave(starts - before, taken)
    return shift + torch.arange(len(shift), device=shift.device)


def _rows_of(value: Tensor | KeyedJaggedTensor | JaggedTensor, name: str) -> int:
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else 0
    if isinstance(value, JaggedTensor):
        return len(value.lengths())
    if value.variable_stride_per_key():
        raise ValueError(
            f"{name} has another number of samples for each key, so it has no rows to move: "
            "shuffle before samples are deduplicated, or use no shuffler"
        )
    return int(value.stride())


def _mapped(value: Any, name: str, rows: int, fn: Callable[[Any], Any]) -> Any:
    """Return a copy of a nested value in which ``fn`` has replaced each (jagged) tensor."""
    if isinstance(value, Tensor | KeyedJaggedTensor | JaggedTensor):
        has = _rows_of(value, name)
        if has != rows:
            raise ValueError(
                f"{name} has {has} rows, and the batch has {rows}: a shuffler moves whole rows, so "
                "every tensor of the batch must have one entry per row. Store values of the whole "
                "batch elsewhere, or as plain numbers"
            )
        return fn(value)
    if isinstance(value, list | tuple):
        parts = [_mapped(part, f"{name}.{place}", rows, fn) for place, part in enumerate(value)]
        # A named tuple takes its fields as arguments, other sequences take an iterable.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    # Frozen dataclasses are not initialised again, hence object.__setattr__.
    put: Callable[[Any, Any, Any], object] = object.__setattr__
    if isinstance(value, Mapping):
        children = dict(value)
        put = operator.setitem
    elif dataclasses.is_dataclass(type(value)):
        children = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif hasattr(value, "record_stream"):
        children = dict(vars(value))
    else:
        return value
    # Copied shallowly: other attributes stay as they are.
    clone = copy.copy(value)
    for key, child in children.items():
        put(clone, key, _mapped(child, f"{name}.{key}", rows, fn))
    return clone
