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
from collections.abc import Callable, Mapping, Sequence
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
        first = rank * size
        end = (rank + 1) * size
        mine = [[row - first for row in share if first <= row < end] for share in shares]
        received = [0] * len(shares)
        for row in shares[rank]:
            received[row // size] += 1
        order = tuple(row for rows in mine for row in rows)
        return cls(order, [len(rows) for rows in mine], received)


class _Jagged:
    """A jagged tensor, with its lengths as [B, keys]."""

    def __init__(self, value: JaggedTensor | KeyedJaggedTensor) -> None:
        self.value = value
        self.keys = len(value.keys()) if isinstance(value, KeyedJaggedTensor) else 1
        self.lengths = value.lengths().view(self.keys, -1).t().contiguous()

    def send(self, route: Route, lengths: Tensor, group: Group) -> JaggedTensor | KeyedJaggedTensor:
        """Exchange the rows; return the tensor of the new rows, with these lengths [B, keys]."""
        order = _index(route.order, lengths)
        sent = torch.split(self.lengths.sum(1)[order], route.sent)
        received = torch.split(lengths.sum(1), route.received)
        # The sizes of the exchange are needed on the host. One copy for both directions waits once.
        counts = torch.stack([rows.sum() for rows in (*sent, *received)]).tolist()
        counts_out = counts[: len(sent)]
        counts_in = counts[len(sent) :]
        # Values lie by key, then row. For the exchange they are ordered by row, so that each rank's
        # rows are contiguous, and on arrival they are ordered by key again.
        by_key = torch.arange(lengths.numel(), device=lengths.device).view(self.keys, -1)
        outward = _segments(self.value.lengths(), by_key[:, order].t())
        arrived = lengths.flatten()
        inward = _segments(arrived, by_key.view(-1, self.keys).t())

        def move(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return _all_to_all(values[outward], counts_out, counts_in, group)[inward]

        values = move(self.value.values())
        weights = move(self.value.weights_or_none())
        by_row = lengths
        lengths = lengths.t().flatten()
        if isinstance(self.value, JaggedTensor):
            return JaggedTensor(values, weights, lengths=lengths)
        # Without keys, the number of rows cannot be derived from the lengths.
        stride = len(by_row) if self.keys else self.value.stride()
        keys = self.value.keys()
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=stride)


def exchange_rows(batch: Any, route: Route, group: Group = None) -> Any:
    """Return the batch of this rank's new rows; a collective of the group.

    ``batch`` has tensors of B rows, ``KeyedJaggedTensor`` and ``JaggedTensor`` of B samples, alone
    or in dataclasses, other objects with ``record_stream``, mappings, lists and tuples. It is not
    modified; other values are passed on. The group's backend must support its device.

    Raises:
        ValueError: A tensor of the batch has a different number of rows.
    """
    # The first pass collects the tensors, in a fixed order; the second one puts the new tensors in
    # their places, in the same order.
    parts: list[Any] = []

    def note(part: Any) -> Any:
        parts.append(part)
        return part

    _mapped(batch, "batch", len(route.order), note)
    if not parts:
        return batch
    pieces = [part if isinstance(part, Tensor) else _Jagged(part) for part in parts]
    columns = [piece if isinstance(piece, Tensor) else piece.lengths for piece in pieces]
    arrived = _exchange_columns(columns, route, group)
    fresh = (
        rows if isinstance(piece, Tensor) else piece.send(route, rows, group)
        for rows, piece in zip(arrived, pieces, strict=True)
    )
    return _mapped(batch, "batch", len(route.order), lambda _: next(fresh))


def _exchange_columns(columns: Sequence[Tensor], route: Route, group: Group) -> list[Tensor]:
    rows = len(route.order)
    # Columns of all types are exchanged as one table of bytes, which takes one collective.
    widths = [column.element_size() * math.prod(column.shape[1:]) for column in columns]
    as_bytes = [
        column.detach().contiguous().flatten().view(torch.uint8).view(rows, width)
        for column, width in zip(columns, widths, strict=True)
    ]
    table = torch.cat(as_bytes, dim=1)[_index(route.order, columns[0])]
    arrived = _all_to_all(table, route.sent, route.received, group)
    return [
        part.clone().flatten().view(column.dtype).view(column.shape)
        for part, column in zip(torch.split(arrived, widths, dim=1), columns, strict=True)
    ]


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


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


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
