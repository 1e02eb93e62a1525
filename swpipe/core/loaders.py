"""Loaders that read nothing that a loop's tasks or its body may change.

A list, a tuple and a range have their batches already. The worker processes of torch's
``DataLoader`` have their own copies of dataset and ``collate_fn``, made when the pass begins. They
still see what they share with this process: a ``multiprocessing.Value``, tensors in shared memory,
memory maps, files. The loop is assumed to write none of these. With each pull, the ``DataLoader``
still does this in this process:

    samplers      torch's samplers read attributes, generators of their own, and a dataset's length
    pin_memory    runs on a thread of the loader's, which is ahead in a plain loop, too

A loader of any other class runs code that may read anything that the loop changes. Torchdata's
``StatefulDataLoader`` works in the same way, but a loop may ask for its state in mid-pass.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import chain
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter, _InfiniteConstantSampler
from torch.utils.data.distributed import DistributedSampler

from swpipe._values.stateful import is_generator

SEQUENCES = (list, tuple, range)

_ACCELERATE = "accelerate.data_loader"

# Torch's own samplers, by exact class: a subclass may read anything. DataLoader has the private
# _InfiniteConstantSampler over an IterableDataset (torch 2.13).
_SAMPLERS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    _InfiniteConstantSampler,
)


class LoaderAround:
    """A loader of swpipe's around another one; a pull touches what a pull of the inner one touches.

    Attributes:
        loader: The inner loader.
        touches: A description of what else a pull may touch; empty for nothing.
    """

    loader: Any
    touches = ""

    def leave(self) -> None:
        """Leave the pass that began last: a pull of that pass must not wait any more."""


def is_apart(loader: Any, *, draws_watched: bool = False) -> bool:
    """Return whether pulling a batch touches nothing that tasks or the loop's body may change.

    Args:
        loader: The iterable of batches; a loader that Accelerate prepared counts as the one inside.
        draws_watched: Whether draws of other code from ``generators_in_pass`` are detected.
    """
    return why_not_apart(loader, draws_watched=draws_watched) is None


def why_not_apart(loader: Any, *, draws_watched: bool = False) -> tuple[str, str] | None:
    """Return why a loader may not be apart, and what to do; None if it is apart."""
    if type(loader) in SEQUENCES:
        return None
    if isinstance(loader, LoaderAround):
        if loader.touches:
            return loader.touches, "Stop at the first end, or let a sampler pad"
        if type(loader.loader) is list:
            return "is over a list, which the loop may change", "Give it a tuple"
        return why_not_apart(loader.loader, draws_watched=draws_watched)
    loader = unprepared(loader)
    # _BaseDataLoaderIter is the private base class of a DataLoader's iterators (torch 2.13).
    if isinstance(loader, _BaseDataLoaderIter):
        return "is an iterator of a DataLoader", "Give the DataLoader itself, with workers"
    worker = "Let a worker make them (DataLoader(num_workers=1))"
    if isinstance(loader, GeneratorType) or getattr(loader, "num_workers", None) == 0:
        return "makes its batches in this process, and may read what the loop changes", worker
    # A subclass may override anything, so only the class itself is known.
    if type(loader) is not DataLoader:
        what = "is of a class of which it is not known whether it reads what the loop changes"
        return what, "Use torch's own DataLoader, with workers"
    for sampler in samplers_of(loader):
        if _may_be_changed(sampler):
            what = "has indices in a list or tensor, which the loop may change"
            return what, f"Give {type(sampler).__name__} a tuple or range"
        if not _is_known(sampler):
            what = f"has a sampler ({type(sampler).__name__}) that may read what the loop changes"
            return what, "Use one of torch's"
    if draws_watched or not generators_in_pass(loader):
        return None
    return "has a sampler with a generator of its own, from which the loop may draw", "Give none"


def _is_known(sampler: Any) -> bool:
    """Return whether it is known what a sampler reads."""
    # By name, since Accelerate is not imported here.
    accelerates = "BatchSamplerShard", "SeedableRandomSampler", "SkipBatchSampler"
    kind = type(sampler)
    return kind in (*_SAMPLERS, tuple, range) or (
        kind.__module__ == _ACCELERATE and kind.__name__ in accelerates
    )


def _may_be_changed(sampler: Any) -> bool:
    """Return whether a sampler reads indices in mid-pass from a list or tensor of the loop's."""
    return type(sampler) is SubsetRandomSampler and type(sampler.indices) not in (tuple, range)


def draws_nothing(loader: Any) -> bool:
    """Return whether a loader's type tells that only its first pull uses default generators.

    Worker processes have generators of their own; torch's samplers draw their seed at the first
    pull of a pass.
    """
    if isinstance(loader, LoaderAround):
        return draws_nothing(loader.loader)
    loader = unprepared(loader)
    stateful = _of("torchdata.stateful_dataloader", "StatefulDataLoader")
    if type(loader) not in (DataLoader, *stateful):
        return type(loader) in SEQUENCES
    # torchdata has samplers of its own that take the place of torch's in a StatefulDataLoader.
    own = _of("torchdata.stateful_dataloader.sampler", "RandomSampler", "BatchSampler")
    samplers = [*samplers_of(loader)]
    if draws_in_mid_pass(loader) or not all(_is_known(s) or type(s) in own for s in samplers):
        return False
    # Without workers, the dataset and collate_fn run in this process, and must be known, too.
    collates = loader.collate_fn in (default_collate, default_convert)
    return loader.num_workers > 0 or (
        collates and type(loader.dataset) in (TensorDataset, *SEQUENCES)
    )


def draws_in_mid_pass(loader: object) -> str:
    """Return the name of a sampler's class that draws from torch's default generator in mid-pass.

    The name is empty if there is no sampler of this kind.
    """
    for sampler in samplers_of(loader):
        if getattr(sampler, "generator", None) is torch.default_generator:
            return type(sampler).__name__
    return ""


def unprepared(loader: object) -> Any:
    """Return the ``DataLoader`` inside Accelerate's loader or swpipe's; any other as it is."""
    while isinstance(loader, LoaderAround):
        loader = loader.loader
    kind = type(loader)
    prepared = kind.__name__ in ("DataLoaderShard", "SkipDataLoader")
    if prepared and kind.__module__ == _ACCELERATE:
        # From vars(): Accelerate's __getattr__ asks the inner loader (Accelerate 1.15).
        return vars(loader).get("base_dataloader")
    return loader


def samplers_of(loader: object) -> Iterator[Any]:
    """Yield the sampler that a ``DataLoader`` asks for indices, and the samplers inside it."""
    loader = unprepared(loader)
    if not isinstance(loader, DataLoader):
        return
    # Without batch_sampler (batch_size=None) the loader asks the sampler itself.
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None:
        yield sampler
        names = vars(sampler) if hasattr(sampler, "__dict__") else {}
        sampler = names.get("batch_sampler", names.get("sampler"))


def generators_in_pass(loader: object) -> list[torch.Generator]:
    """Return the generators given to samplers that draw from them in the middle of a pass.

    All other samplers draw before the first batch, as in a plain loop.
    """
    # With a generator that was given, RandomSampler draws indices whenever it has none left; with
    # its own, it draws from torch's default generator once, at the beginning of a pass.
    kinds = (RandomSampler, *_of("torchdata.stateful_dataloader.sampler", "RandomSampler"))
    return [
        sampler.generator
        for sampler in samplers_of(loader)
        if type(sampler) in kinds and sampler.generator is not None
    ]


def own_generators(loader: object) -> dict[str, tuple[object, str]]:
    """Return the random generators that a loader, its samplers and its dataset have as attributes.

    Only objects of classes that torch, torchdata or Accelerate define, or of derived classes, are
    searched. Accelerate's sampler is left out: it seeds its generator whenever a pass begins.

    Returns:
        A name for each generator, to the object that has it and the attribute.
    """
    nodes = _of("torchdata.nodes.base_node", "BaseNode"), _of("torchdata.nodes.loader", "Loader")
    kinds = (DataLoader, Sampler, Dataset, *chain(*nodes))
    seeded = (random.SystemRandom, *_of(_ACCELERATE, "SeedableRandomSampler"))
    generators: dict[str, tuple[object, str]] = {}
    visited: list[object] = []
    # A work list, since samplers and datasets may be nested to any depth, or in a cycle.
    parts = [part for part in [unprepared(loader)] if isinstance(part, kinds)]
    while parts:
        part = parts.pop(0)
        if (
            not hasattr(part, "__dict__")
            or isinstance(part, seeded)
            or any(part is s for s in visited)
        ):
            continue
        visited.append(part)
        for attribute, value in vars(part).items():
            # Several objects may share one generator: it is listed once, where it is found first.
            if is_generator(value) and not any(value is s for s in visited):
                visited.append(value)
                name = f"the {attribute} of its {type(part).__name__}"
                many = sum(other.startswith(name) for other in generators)
                generators[f"{name} ({many + 1})" if many else name] = part, attribute
            elif attribute == "datasets":  # such as those of a ConcatDataset
                parts += value
            elif attribute in _PARTS or isinstance(value, kinds):
                parts.append(value)
    return generators


_PARTS = ("sampler", "batch_sampler", "dataset")
"""Attributes of loaders, samplers and datasets whose values may be of any class."""


def read_in_pass(loader: object) -> list[Any]:
    """Return the attributes that known samplers still read in the middle of a pass.

    A pass that is pulled ahead reads them earlier than a plain one, so they must not change.
    """
    values: list[Any] = []
    for sampler in samplers_of(loader):
        attributes = vars(sampler) if hasattr(sampler, "__dict__") else {}
        values += [attributes[name] for name in _IN_PASS if name in attributes]
        if isinstance(sampler, RandomSampler):  # which asks for the length at the end of its pass
            values.append(len(sampler.data_source))
    return values


# Accelerate's BatchSamplerShard reads the last three, torch's samplers the rest.
_IN_PASS = (
    *("batch_size", "drop_last", "sampler", "batch_sampler"),
    *("indices", "replacement", "_num_samples"),
    *("even_batches", "num_processes", "process_index"),
)


def are_same(before: list[Any], after: list[Any]) -> bool:
    """Return whether values are the same objects, or equal integers."""
    return len(before) == len(after) and all(
        old is new or (type(old) is int and old == new)
        for old, new in zip(before, after, strict=True)
    )


def _of(module: str, *names: str) -> tuple[type, ...]:
    """Return the named classes of a module; none if the module is not loaded."""
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))
