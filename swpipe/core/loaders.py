"""Which loaders read nothing that a loop's tasks or its body may change.

A list, a tuple and a range have their batches already. The worker processes of torch's
``DataLoader`` have their own copies of dataset and ``collate_fn``, made when the pass begins. What
such a loader still does in this process, with each pull:

    samplers      torch's read attributes and generators of their own, and ``len()`` of a dataset
    pin_memory    on a thread of the loader's, which is ahead in a plain loop, too

A loader of any other class runs code that may read whatever the loop changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler
from torch.utils.data.distributed import DistributedSampler

SEQUENCES = (list, tuple, range)

_SAMPLERS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    _InfiniteConstantSampler,
)


def is_apart(loader: Any, *, draws_watched: bool = False) -> bool:
    """Whether pulling a batch touches nothing that tasks or the loop's body may change.

    Args:
        loader: As in ``for batch in loader``; one that Accelerate prepared is what it wraps.
        draws_watched: Whether somebody looks if others draw from ``generators_in_pass``.
    """
    if type(loader) in SEQUENCES:
        return True
    loader = unprepared(loader)
    torchdatas = _of("torchdata.stateful_dataloader", "StatefulDataLoader")
    if type(loader) not in (DataLoader, *torchdatas):
        return False
    known = (
        *_SAMPLERS,
        *_of("torchdata.stateful_dataloader.sampler", "BatchSampler", "RandomSampler"),
        *_of("accelerate.data_loader", "BatchSamplerShard", "SeedableRandomSampler"),
        *_of("accelerate.data_loader", "SkipBatchSampler"),
    )
    return bool(
        loader.num_workers > 0
        and all(type(one) in (*known, tuple, range) for one in samplers_of(loader))
        and (draws_watched or not generators_in_pass(loader))
    )


def unprepared(loader: object) -> Any:
    """The ``DataLoader`` that Accelerate's loader wraps; any other loader as it is."""
    prepared = type(loader) in _of("accelerate.data_loader", "DataLoaderShard", "SkipDataLoader")
    return vars(loader).get("base_dataloader") if prepared else loader


def samplers_of(loader: Any) -> Iterator[Any]:
    """The sampler that a ``DataLoader`` asks for indices, and those within it."""
    one = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while one is not None:
        yield one
        names = vars(one) if hasattr(one, "__dict__") else {}
        one = names.get("batch_sampler", names.get("sampler"))


def generators_in_pass(loader: object) -> list[torch.Generator]:
    """Generators that somebody gave to samplers, which draw from them in the middle of a pass.

    Other samplers draw before the first batch is there, as in a plain loop.
    """
    loader = unprepared(loader)
    kinds = (RandomSampler, *_of("torchdata.stateful_dataloader.sampler", "RandomSampler"))
    found = samplers_of(loader) if isinstance(loader, DataLoader) else ()
    return [one.generator for one in found if type(one) in kinds and one.generator is not None]


def _of(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a library; none if nobody has loaded it."""
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))
