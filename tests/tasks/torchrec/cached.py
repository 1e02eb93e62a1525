"""Tables whose look-up takes what the oldest prefetch left: what stands in for dynamicemb's.

Those need a GPU. These keep their contract, with one row at a time in Python objects:

    prefetch   makes the rows of unseen keys, brings rows into slots, pins them, and appends a state
               to the queue; with a cache, it also counts the keys as outstanding. With admission,
               the row of a key is kept from when the key was counted often enough: as often as
               ``frequency_counters`` say, or once in each batch
    forward    takes the oldest state of the queue, or prefetches by itself where there is none,
               with its weights as these counters; reads the slots of that state, whatever ids it
               is called with; counts the keys off
    backward   updates the rows in their slots, and unpins them

More outstanding keys than the cache has lines, or no slot that may be taken: ``CacheOverflow``. In
evaluation, prefetch does nothing and forward reads without a state. TorchRec prefetches collections
(``Job(pooled=False)``) only; bags prefetch within their forward.

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

    def bring(self, keys: list[Key], admitted: list[bool]) -> Tensor:
        """The slots of some rows, which are there and pinned afterwards; -1 for others."""
        slots = [self._bring(key) if a else -1 for key, a in zip(keys, admitted, strict=True)]
        return torch.tensor(slots, dtype=torch.int64)

    def holds(self, key: Key) -> bool:
        """Whether there is such a row, here or evicted."""
        return key in self._slot_of or key in self.behind

    def read(self, slots: Tensor, keys: list[Key]) -> Tensor:
        """The rows in some slots; those of keys without one are new."""
        pairs = zip(slots.tolist(), keys, strict=True)
        rows = [initial(key) if slot < 0 else self._values[slot] for slot, key in pairs]
        return torch.stack(rows or [torch.empty(DIM)])

    def update(self, slots: Tensor, gradients: Tensor, rate: float) -> None:
        """One step of SGD."""
        for slot, gradient in zip(slots.tolist(), gradients, strict=True):
            if slot >= 0:
                self._values[slot] -= rate * gradient

    def decrement_counter(self, slots: Tensor, table_ids: Tensor) -> None:
        """Unpin some slots, each once."""
        assert len(slots) == len(table_ids)
        self._pins.subtract(slots[slots >= 0].tolist())
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
        pooled: The embeddings of a bag are added.
        rate: The learning rate.
        threshold: How often a key is counted before its row is kept; 0 for at once.

    Attributes:
        most: The most keys that were outstanding.
        counts: Of keys whose rows are not kept yet.
        fails: The next look-up raises, in the middle.
    """

    def __init__(
        self, tables: int, lines: int | None, pooled: bool, rate: float, threshold: int = 0
    ) -> None:
        super().__init__()
        self.counts: Counter[Key] = Counter()
        self._threshold = threshold
        self.most = 0
        self.fails = False
        self._count, self._pooled, self._rate = tables, pooled, rate
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
        slots = self.slots.bring(keys, self._admit(keys, reverse, frequency_counters))
        self._prefetch_states.append(
            PrefetchState(pairs[1], pairs[0], reverse, slots, slots.clone(), len(keys), counted)
        )

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """The embeddings of the ids of the oldest state."""
        if not self.training:
            pairs = zip(self._tables_of(offsets).tolist(), indices.tolist(), strict=True)
            rows = [self.slots.row(key) for key in pairs]
            return self.arranged(torch.stack(rows) if rows else torch.empty(0, DIM), offsets)
        if not self._prefetch_states:
            self.prefetch(indices, offsets, frequency_counters=per_sample_weights)
        state = self._prefetch_states.popleft()
        found: Tensor = _LookUp.apply(state, self, offsets, self._empty_tensor)  # type: ignore[no-untyped-call]
        return found

    def _admit(self, keys: list[Key], reverse: Tensor, counters: Tensor | None) -> list[bool]:
        """Count the keys that have no row, and say which may have one."""
        seen = torch.ones(len(keys), dtype=torch.int64)
        if counters is not None:
            seen = torch.zeros_like(seen).index_add_(0, reverse, counters.long())
        for key, count in zip(keys, seen.tolist(), strict=True):
            if not self.slots.holds(key) and not self._storage.holds(key):
                self.counts[key] += count
        admitted = [key not in self.counts or self.counts[key] >= self._threshold for key in keys]
        for key, enough in zip(keys, admitted, strict=True):
            if enough:
                self.counts.pop(key, None)
        return admitted

    def arranged(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """One row for each id, or with pooling for each sample: those of all tables, added up."""
        if not self._pooled:
            return rows
        bags = rows.new_zeros(len(offsets) - 1, DIM)
        bags.index_add_(0, _bags_of(offsets), rows)
        return bags.view(self._count, -1, DIM).transpose(0, 1).reshape(-1, self._count * DIM)

    def gradients(self, given: Tensor, offsets: Tensor) -> Tensor:
        """The gradient of each id's row, from that of what ``arranged`` returned."""
        if not self._pooled:
            return given
        by_bag = given.view(-1, self._count, DIM).transpose(0, 1).reshape(-1, DIM)
        return by_bag[_bags_of(offsets)]

    def step(self, state: PrefetchState, gradients: Tensor) -> None:
        """Update the rows of one batch."""
        self.slots.update(state.slot_indices, gradients, self._rate)

    def flush(self) -> None:
        """Nothing: ``rows`` looks into the cache."""

    def _tables_of(self, offsets: Tensor) -> Tensor:
        samples = (len(offsets) - 1) // self._count
        return _bags_of(offsets) // max(samples, 1)


def _bags_of(offsets: Tensor) -> Tensor:
    """The bag of each id."""
    return torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())


class _LookUp(torch.autograd.Function):
    """Reads rows; its backward updates them."""

    @staticmethod
    def forward(
        ctx: Any, state: PrefetchState, tables: DynamicTables, offsets: Tensor, anchor: Tensor
    ) -> Tensor:
        ctx.state, ctx.tables, ctx.offsets = state, tables, offsets
        if tables.fails:
            raise RuntimeError("the look-up failed")
        pairs = zip(state.unique_table_ids.tolist(), state.unique_keys.tolist(), strict=True)
        rows = tables.slots.read(state.slot_indices, list(pairs))[state.reverse_indices]
        if state.outstanding_keys_ref is not None:
            state.outstanding_keys_ref -= state.num_prefetched_keys
        return tables.arranged(rows, offsets)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        state, tables = ctx.state, ctx.tables
        per_id = tables.gradients(given[0], ctx.offsets)
        per_key = per_id.new_zeros(len(state.unique_keys), DIM)
        per_key.index_add_(0, state.reverse_indices, per_id)
        tables.step(state, per_key)
        tables.slots.decrement_counter(state.update_slot_indices, state.unique_table_ids)
        return None, None, None, None


def dynamic(
    job: Job, lines: int | None, threshold: int = 0
) -> tuple[nn.Module, list[DynamicTables]]:
    """A job's model on dynamic tables, with this rank's groups of them; row-wise as theirs are."""
    model = sharded(job)
    return model, replace_tables(model, lines, job.pooled, job.options["lr"], threshold)


def replace_tables(
    model: nn.Module, lines: int | None, pooled: bool, rate: float, threshold: int = 0
) -> list[DynamicTables]:
    """Put dynamic tables in the place of this rank's groups of a sharded model.

    With a threshold, ids are exchanged with how often each occurs in this rank's batch as weights,
    which the look-up takes for counters: those of dynamicemb are exchanged once each, so.
    """
    groups = []
    for module in model.modules() if threshold else ():
        if hasattr(module, "_lookups"):
            module.input_dist = partial(_counted_input_dist, module.input_dist)
    for lookup in lookups(model):
        for kernel in lookup._emb_modules:
            count = len(kernel.config.embedding_tables)
            kernel._emb_module = DynamicTables(count, lines, pooled, rate, threshold)
            if threshold:
                kernel.forward = partial(_look_up_counted, kernel)
            lookup._need_prefetch = True
            groups.append(kernel._emb_module)
    return groups


def _counted_input_dist(input_dist: Any, ctx: Any, features: Any) -> Any:
    counted = copy.copy(features)
    counted._weights = torch.zeros(len(features.values()))
    first = 0
    for length in features.length_per_key():  # the first of equal ids has their number
        own = features.values()[first : first + length].tolist()
        for place, row in enumerate(own):
            if own.index(row) == place:
                counted._weights[first + place] = own.count(row)
        first += length
    return input_dist(ctx, counted)


def _look_up_counted(kernel: Any, features: Any) -> Tensor:
    found: Tensor = kernel._emb_module(
        features.values().long(), features.offsets().long(), features.weights_or_none()
    )
    return found


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
