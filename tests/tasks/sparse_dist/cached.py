"""Sharded tables behind a small cache, with the bookkeeping of tables that are prefetched.

What stands in here for dynamicemb's tables, which need a GPU: rows live in host memory, lookups see
only what a cache holds, and the cache is smaller than two batches need. Its contract:

    prefetch   counts its keys as outstanding, loads their rows, and pins these until the lookup;
               more outstanding keys than the cache has lines: CacheOverflow
    lookup     needs each row there and pinned (CacheMiss), unpins it, counts its keys off again

So a batch must be looked up before the next but one, or with little room the next one, is
prefetched. The numbers are TorchRec's own: the cache keeps books on rows, not their values.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

from swpipe.tasks.sparse_dist import _torchrec  # noqa: F401 - quiets what follows

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection


class CacheOverflow(RuntimeError):
    """More keys were prefetched, and not yet looked up, than the cache has lines."""


class CacheMiss(RuntimeError):
    """A lookup met a row that was not prefetched, or was evicted since."""


class Cache:
    """Which rows are there, the least recently used evicted first; pinned ones stay.

    Args:
        lines: How many rows fit.

    Attributes:
        outstanding: Keys prefetched and not looked up, each as often as batches hold it.
        most: The highest that ``outstanding`` has been.
        calls: What was done, "prefetch" or "lookup", in order.
    """

    def __init__(self, lines: int) -> None:
        self.lines = lines
        self.outstanding = 0
        self.most = 0
        self.calls: list[str] = []
        self._rows: dict[int, None] = {}  # the least recently used first
        self._pins: Counter[int] = Counter()

    def prefetch(self, keys: list[int]) -> None:
        """Load the rows of one batch's distinct keys, and pin them."""
        self.calls.append("prefetch")
        self.outstanding += len(keys)
        self.most = max(self.most, self.outstanding)
        if self.outstanding > self.lines:
            raise CacheOverflow(
                f"{self.outstanding} keys are outstanding and the cache has {self.lines} lines: "
                "a batch was prefetched before the one ahead of it was looked up"
            )
        self._pins.update(keys)
        for key in keys:
            self._rows.pop(key, None)
            self._rows[key] = None
        spare = [key for key in self._rows if not self._pins[key]]
        for key in spare[: max(0, len(self._rows) - self.lines)]:
            del self._rows[key]

    def look_up(self, keys: list[int]) -> None:
        """Use the rows of one batch's distinct keys, and unpin them."""
        self.calls.append("lookup")
        missing = [key for key in keys if key not in self._rows or not self._pins[key]]
        if missing:
            raise CacheMiss(f"{len(missing)} of {len(keys)} rows were not prefetched")
        self._pins.subtract(keys)
        self.outstanding -= len(keys)


class CachedBags(ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """Sharded bags whose lookup goes through a cache, warmed by TorchRec's ``prefetch``."""

    cache: Cache

    def prefetch(self, dist_input: Any, forward_stream: Any = None, ctx: Any = None) -> None:
        """Raise the counter by this batch's keys, and load their rows."""
        self.cache.prefetch(keys_of(dist_input))

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:  # noqa: A002 - TorchRec's name
        """Look up; the counter is lowered at the end."""
        keys = keys_of(input)
        output = super().compute_and_output_dist(ctx, input)
        self.cache.look_up(keys)
        return output


def keys_of(dist_input: Any) -> list[int]:
    """The distinct rows that one rank's share of a batch asks for, over all tables."""
    found: set[int] = set()
    for part, features in enumerate(dist_input):
        for name, jagged in features.to_dict().items():
            table = 1000 * part + int(name.removeprefix("f"))
            found |= {1_000_000 * table + row for row in torch.unique(jagged.values()).tolist()}
    return sorted(found)


def behind_cache(model: nn.Module, lines: int) -> list[Cache]:
    """Put a cache in front of every sharded bag of a model; each of its own."""
    caches = []
    for module in model.modules():
        if type(module) is ShardedEmbeddingBagCollection:
            module.__class__ = CachedBags
            module.cache = Cache(lines)
            caches.append(module.cache)
    return caches
