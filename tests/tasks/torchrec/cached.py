"""Tables whose look-up takes what the oldest prefetch left: what stands in for dynamicemb's.

Those need a GPU. These keep their contract, with one row at a time in Python objects:

    prefetch   makes the rows of unseen keys, brings rows into slots, pins them, and appends a state
               to the queue; with a cache, it also counts the keys as outstanding. Rows are admitted
               by ``frequency_counters``, which are only noted here
    forward    takes the oldest state of the queue, or prefetches by itself where there is none;
               reads the slots of that state, whatever ids it is called with; counts the keys off
    backward   updates the rows in their slots, and unpins them

More outstanding keys than the cache has lines, or no slot that may be taken: ``CacheOverflow``. In
evaluation, prefetch does nothing and forward reads without a state. TorchRec prefetches collections
(``Job(pooled=False)``) only, so there are no bags here.

No parameter leads to a row: they are values of a dict, or lie in the slots of a plain object.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tests.tasks.torchrec.models import DIM, Job, sharded

Key: TypeAlias = tuple[int, int]
"""A table, by its place in the group, and a row's id."""


class CacheOverflow(RuntimeError):
    """More keys are prefetched than there is room for."""


class Slots:
    """Rows in numbered slots, the least recently used evicted first; pinned ones stay.

    Args:
        capacity: How many rows fit before others have to go; None for no limit. As many again fit
            where all are pinned.

    Attributes:
        behind: The rows that were evicted.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.behind: dict[Key, Tensor] = {}
        self._values: list[Tensor] = []
        self._slot_of: dict[Key, int] = {}  # the least recently used first
        self._pins: Counter[int] = Counter()

    @property
    def pinned(self) -> int:
        """How many slots are pinned."""
        return sum(count > 0 for count in self._pins.values())

    def bring(self, keys: list[Key]) -> Tensor:
        """The slots of some rows, which are there and pinned afterwards."""
        return torch.tensor([self._bring(key) for key in keys], dtype=torch.int64)

    def read(self, slots: Tensor) -> Tensor:
        """The rows in some slots."""
        rows = [self._values[slot] for slot in slots.tolist()]
        return torch.stack(rows or [torch.empty(DIM)])

    def update(self, slots: Tensor, gradients: Tensor, rate: float) -> None:
        """One step of SGD."""
        for slot, gradient in zip(slots.tolist(), gradients, strict=True):
            self._values[slot] -= rate * gradient

    def decrement_counter(self, slots: Tensor, table_ids: Tensor) -> None:
        """Unpin some slots, each once."""
        assert len(slots) == len(table_ids)
        self._pins.subtract(slots.tolist())
        assert min(self._pins.values(), default=0) >= 0, "a slot was unpinned more than pinned"

    def rows(self) -> dict[Key, Tensor]:
        """All rows, copied."""
        inside = {key: self._values[slot] for key, slot in self._slot_of.items()}
        return {key: row.clone() for key, row in sorted((self.behind | inside).items())}

    def row(self, key: Key) -> Tensor:
        """One row, for evaluation."""
        if key in self._slot_of:
            return self._values[self._slot_of[key]]
        return self.behind[key] if key in self.behind else initial(key)

    def _bring(self, key: Key) -> int:
        slot = self._slot_of.pop(key, None)
        if slot is None:
            slot = self._free()
            row = self.behind.pop(key, None)
            self._values[slot] = initial(key) if row is None else row
        self._slot_of[key] = slot
        self._pins[slot] += 1
        return slot

    def _free(self) -> int:
        if self.capacity is not None and len(self._slot_of) >= self.capacity:
            for key, slot in self._slot_of.items():
                if not self._pins[slot]:
                    self.behind[key] = self._values[slot].clone()
                    del self._slot_of[key]
                    return slot
            if len(self._values) >= 2 * self.capacity:
                raise CacheOverflow(f"all {len(self._values)} slots are pinned")
        self._values.append(torch.empty(DIM))
        return len(self._values) - 1


def initial(key: Key) -> Tensor:
    """The first value of a row."""
    table, row = key
    return torch.sin(torch.arange(1.0, DIM + 1) * (1 + 31 * table + row)) / 10


@dataclass
class PrefetchState:
    """What one prefetch leaves for its look-up: distinct keys, and the slots of their rows."""

    unique_keys: Tensor
    unique_table_ids: Tensor
    reverse_indices: Tensor
    slot_indices: Tensor
    update_slot_indices: Tensor | None
    num_prefetched_keys: int
    outstanding_keys_ref: Tensor | None


class DynamicTables(nn.Module):
    """The tables of one group, all of ``DIM`` columns, with a fused SGD.

    Args:
        tables: How many; each with one feature.
        lines: Rows that the cache holds; None for no cache.
        rate: The learning rate.

    Attributes:
        most: The most keys that were outstanding.
        counters: The sum of the counters that each prefetch was given; 0 without any.
        fails: The next look-up raises, in the middle.
    """

    def __init__(self, tables: int, lines: int | None, rate: float) -> None:
        super().__init__()
        self.counters: list[float] = []
        self.most = 0
        self.fails = False
        self._count, self._rate = tables, rate
        self._storage = Slots(None)
        self._cache = None if lines is None else Slots(lines)
        self._prefetch_outstanding_keys = torch.tensor(0, dtype=torch.int64)
        self._prefetch_states: deque[PrefetchState] = deque()
        self._empty_tensor = nn.Parameter(torch.empty(10))

    @property
    def cache(self) -> Slots | None:
        """The slots before the storage, if any."""
        return self._cache

    @property
    def tables(self) -> Slots:
        """The storage."""
        return self._storage

    @property
    def slots(self) -> Slots:
        """Where rows are looked up."""
        return self._storage if self._cache is None else self._cache

    def split_embedding_weights(self) -> list[Tensor]:
        """Placeholders, one for each table."""
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
        tables = self._tables_of(offsets)
        pairs, reverse = torch.unique(
            torch.stack([tables, indices]), dim=1, sorted=True, return_inverse=True
        )
        keys = [(int(table), int(row)) for table, row in pairs.t()]
        counted = None
        if self._cache is not None:
            counted = self._prefetch_outstanding_keys
            counted += len(keys)
            self.most = max(self.most, int(counted))
            if int(counted) > (self._cache.capacity or 0):
                raise CacheOverflow(
                    f"{int(counted)} keys are outstanding and the cache has {self._cache.capacity} "
                    "lines: a batch was prefetched before the one ahead of it was looked up"
                )
        given = 0.0 if frequency_counters is None else float(frequency_counters.sum())
        self.counters.append(given)
        slots = self.slots.bring(keys)
        self._prefetch_states.append(
            PrefetchState(pairs[1], pairs[0], reverse, slots, slots.clone(), len(keys), counted)
        )

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """The embeddings of the ids of the oldest state."""
        if not self.training:
            pairs = zip(self._tables_of(offsets).tolist(), indices.tolist(), strict=True)
            rows = [self.slots.row(key) for key in pairs]
            return torch.stack(rows) if rows else torch.empty(0, DIM)
        if not self._prefetch_states:
            self.prefetch(indices, offsets)
        state = self._prefetch_states.popleft()
        found: Tensor = _LookUp.apply(state, self, self._empty_tensor)  # type: ignore[no-untyped-call]
        return found

    def step(self, state: PrefetchState, gradients: Tensor) -> None:
        """Update the rows of one batch."""
        self.slots.update(state.slot_indices, gradients, self._rate)

    def flush(self) -> None:
        """Nothing: ``rows`` looks into the cache."""

    def _tables_of(self, offsets: Tensor) -> Tensor:
        samples = (len(offsets) - 1) // self._count
        bags = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
        return bags // max(samples, 1)


class _LookUp(torch.autograd.Function):
    """Reads rows; its backward updates them."""

    @staticmethod
    def forward(ctx: Any, state: PrefetchState, tables: DynamicTables, anchor: Tensor) -> Tensor:
        ctx.state, ctx.tables = state, tables
        if tables.fails:
            raise RuntimeError("the look-up failed")
        rows = tables.slots.read(state.slot_indices)[state.reverse_indices]
        if state.outstanding_keys_ref is not None:
            state.outstanding_keys_ref -= state.num_prefetched_keys
        return rows

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        state, tables = ctx.state, ctx.tables
        per_key = given[0].new_zeros(len(state.unique_keys), DIM)
        per_key.index_add_(0, state.reverse_indices, given[0])
        tables.step(state, per_key)
        tables.slots.decrement_counter(state.update_slot_indices, state.unique_table_ids)
        return None, None, None


def dynamic(
    job: Job, lines: int | None, counted: bool = False
) -> tuple[nn.Module, list[DynamicTables]]:
    """A job's model on dynamic tables, with this rank's groups of them; row-wise as theirs are.

    If asked for, each id is exchanged with the weight 1, as dynamicemb exchanges its counters.
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
    """The look-ups of all sharded modules, which keep them in plain lists."""
    for module in model.modules():
        yield from getattr(module, "_lookups", ())


def rows_of(groups: list[DynamicTables]) -> dict[str, Tensor]:
    """All rows of this rank, by name, copied."""
    return {
        f"group {number}, row {key}": row
        for number, group in enumerate(groups)
        for key, row in group.slots.rows().items()
    }


def saving(groups: list[DynamicTables]) -> tuple[Any, Any]:
    """Functions that capture and restore all rows."""

    def capture() -> list[Any]:
        return [copy.deepcopy((group._storage, group._cache)) for group in groups]

    def restore(saved: list[Any]) -> None:
        for group, (storage, cache) in zip(groups, saved, strict=True):
            group._storage, group._cache = storage, cache

    return capture, restore


def left_behind(groups: list[DynamicTables]) -> list[str]:
    """What prefetches have left and no look-up or backward has cleared."""
    counts = {
        "states": sum(len(group._prefetch_states) for group in groups),
        "outstanding keys": sum(int(group._prefetch_outstanding_keys) for group in groups),
        "pinned slots": sum(group.slots.pinned for group in groups),
    }
    return [f"{count} {name}" for name, count in counts.items() if count]
