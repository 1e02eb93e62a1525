"""Tables whose look-up takes what the oldest prefetch left: what stands in for dynamicemb's.

Those need a GPU. These keep their contract, with all rows in one plain object:

    prefetch   pins the rows of its keys, and appends a state to the queue; with a cache, it also
               counts the keys as outstanding. Rows are admitted by ``frequency_counters``, which
               are only noted here
    forward    takes the oldest state of the queue, or prefetches by itself where there is none;
               reads the rows of that state, whatever ids it is called with; counts the keys off
    backward   updates the rows, and unpins them

More outstanding keys than the cache has lines, or pinned rows than twice that: ``CacheOverflow``.
In evaluation, prefetch does nothing and forward reads without a state. TorchRec prefetches
collections (``Job(pooled=False)``) only, so there are no bags here.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.tasks.torchrec.models import DIM, ROWS, Job, sharded


class CacheOverflow(RuntimeError):
    """More keys are prefetched than there is room for."""


class Slots:
    """The rows of all tables in sequence, and how often each is pinned.

    Args:
        tables: The number of tables.
        capacity: The number of rows that fit; None for no limit.
    """

    def __init__(self, tables: int, capacity: int | None) -> None:
        self.capacity = capacity
        self.rows = torch.sin(torch.arange(float(tables * ROWS * DIM))).view(-1, DIM) / 10
        self._pins: Counter[int] = Counter()

    @property
    def pinned(self) -> int:
        """The number of pinned rows."""
        return sum(count > 0 for count in self._pins.values())

    def pin(self, slots: Tensor) -> None:
        """Pin some rows, each once."""
        self._pins.update(slots.tolist())
        if self.capacity is not None and self.pinned > 2 * self.capacity:
            raise CacheOverflow(f"{self.pinned} rows are pinned")

    def decrement_counter(self, slots: Tensor, table_ids: Tensor) -> None:
        """Unpin some rows, each once."""
        assert len(slots) == len(table_ids)
        self._pins.subtract(slots.tolist())
        assert min(self._pins.values(), default=0) >= 0, "a row was unpinned more than pinned"


@dataclass
class PrefetchState:
    """The state that a prefetch leaves for its look-up: the slots of distinct keys."""

    unique_table_ids: Tensor
    reverse_indices: Tensor
    update_slot_indices: Tensor
    num_prefetched_keys: int
    outstanding_keys_ref: Tensor | None


class DynamicTables(nn.Module):
    """The tables of one group, all of ``DIM`` columns, with a fused SGD.

    Args:
        tables: The number of tables, each with one feature.
        lines: Rows that the cache holds; None for no cache.
        rate: The learning rate.

    Attributes:
        cache: The slots before the storage, if any.
        tables: The storage.
        slots: The slots in which rows are looked up.
        most: The most keys that were outstanding.
        counters: The sum of the counters that each prefetch was given; 0 without any.
        fails: The next look-up raises, in the middle.
    """

    def __init__(self, tables: int, lines: int | None, rate: float) -> None:
        super().__init__()
        self.tables = Slots(tables, None)
        self.cache = None if lines is None else Slots(tables, lines)
        self.slots = self.cache or self.tables
        self.counters: list[float] = []
        self.most = 0
        self.fails = False
        self.rate = rate
        self._count = tables
        self._prefetch_outstanding_keys = torch.tensor(0, dtype=torch.int64)
        self._prefetch_states: deque[PrefetchState] = deque()
        self._empty_tensor = nn.Parameter(torch.empty(10))

    def split_embedding_weights(self) -> list[Tensor]:
        """Return a placeholder for each table."""
        return [torch.empty(1, 1) for _ in range(self._count)]

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        forward_stream: Any = None,
        batch_size_per_feature_per_rank: Any = None,
        frequency_counters: Tensor | None = None,
    ) -> None:
        """Prepare the look-up of one batch."""
        if not self.training:
            return
        slots, reverse = torch.unique(self._slots_of(indices, offsets), return_inverse=True)
        counted = None
        if self.cache is not None:
            counted = self._prefetch_outstanding_keys
            counted += len(slots)
            self.most = max(self.most, int(counted))
            if int(counted) > (self.cache.capacity or 0):
                raise CacheOverflow(
                    f"{int(counted)} keys are outstanding and the cache has {self.cache.capacity} "
                    "lines: a batch was prefetched before the one ahead of it was looked up"
                )
        self.counters.append(float(0 if frequency_counters is None else frequency_counters.sum()))
        self.slots.pin(slots)
        state = PrefetchState(slots // ROWS, reverse, slots, len(slots), counted)
        self._prefetch_states.append(state)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """Return the embeddings of the ids of the oldest state."""
        if not self.training:
            return self.slots.rows[self._slots_of(indices, offsets)]
        if not self._prefetch_states:
            self.prefetch(indices, offsets)
        state = self._prefetch_states.popleft()
        found: Tensor = _LookUp.apply(state, self, self._empty_tensor)  # type: ignore[no-untyped-call]
        return found

    def flush(self) -> None:
        """Do nothing."""

    def _slots_of(self, indices: Tensor, offsets: Tensor) -> Tensor:
        samples = max((len(offsets) - 1) // self._count, 1)
        bags = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
        return bags // samples * ROWS + indices


class _LookUp(torch.autograd.Function):
    """A look-up of rows, whose backward updates them."""

    @staticmethod
    def forward(ctx: Any, state: PrefetchState, tables: DynamicTables, anchor: Tensor) -> Tensor:
        ctx.state, ctx.tables = state, tables
        if tables.fails:
            raise RuntimeError("the look-up failed")
        if state.outstanding_keys_ref is not None:
            state.outstanding_keys_ref -= state.num_prefetched_keys
        return tables.slots.rows[state.update_slot_indices][state.reverse_indices]

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        state, slots = ctx.state, ctx.tables.slots
        per_key = given[0].new_zeros(state.num_prefetched_keys, DIM)
        per_key.index_add_(0, state.reverse_indices, given[0])
        slots.rows[state.update_slot_indices] -= ctx.tables.rate * per_key
        slots.decrement_counter(state.update_slot_indices, state.unique_table_ids)
        return None, None, None


def dynamic(
    job: Job, lines: int | None, counted: bool = False
) -> tuple[nn.Module, list[DynamicTables]]:
    """Return a job's model on row-wise dynamic tables, and this rank's groups of tables.

    If requested, each id is exchanged with the weight 1, as dynamicemb exchanges its counters.
    """
    model: Any = sharded(job)
    groups = []
    for module in model.module.tables if counted else ():
        module.input_dist = partial(_counted_input_dist, module.input_dist)
    for lookup in lookups(model):
        for kernel in lookup._emb_modules:
            count = len(kernel.config.embedding_tables)
            kernel._emb_module = DynamicTables(count, lines, job.options["lr"])
            lookup._need_prefetch = True
            groups.append(kernel._emb_module)
    return model, groups


def _counted_input_dist(input_dist: Any, ctx: Any, features: Any) -> Any:
    counted = copy.copy(features)
    counted._weights = torch.ones(len(features.values()))
    return input_dist(ctx, counted)


def lookups(model: nn.Module) -> Iterator[Any]:
    """Yield the look-ups of all sharded modules, which keep them in plain lists."""
    for module in model.modules():
        yield from getattr(module, "_lookups", ())


def rows_of(groups: list[DynamicTables]) -> dict[str, Tensor]:
    """Return copies of all rows of this rank."""
    return {f"group {number}": group.slots.rows.clone() for number, group in enumerate(groups)}


def saving(groups: list[DynamicTables]) -> tuple[Any, Any]:
    """Return functions that capture and restore all rows."""

    def restore(saved: dict[str, Tensor]) -> None:
        for group, rows in zip(groups, saved.values(), strict=True):
            group.slots.rows.copy_(rows)

    return partial(rows_of, groups), restore


def left_behind(groups: list[DynamicTables]) -> list[str]:
    """Return what prefetches have left that no look-up or backward has cleared."""
    counts = {
        "states": sum(len(group._prefetch_states) for group in groups),
        "outstanding keys": sum(int(group._prefetch_outstanding_keys) for group in groups),
        "pinned slots": sum(group.slots.pinned for group in groups),
    }
    return [f"{count} {name}" for name, count in counts.items() if count]
