"""Tasks whose code leads to what a loader uses in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Sampler

from swpipe._state.discovery import is_installed
from swpipe._tensors.stateful import is_foreign
from swpipe.core.task import PipelineTask

LOADER = "the loader"

_MAX_WRAPPERS = 4
"""How many objects of installed libraries are looked into, one in the other."""

_SAMPLING = ("batch_sampler", "sampler", "generator")
_READING = ("dataset", "collate_fn", *_SAMPLING)
_DATASETS = ("dataset", "data_source")


def reaching(loader: Any, *iterators: Any) -> PipelineTask:
    """A task that does nothing, and whose code leads to what the loader and its iterators use."""
    elsewhere = isinstance(loader, DataLoader) and loader.num_workers > 0
    return _leading_to(*_parts(loader, _MAX_WRAPPERS), *(() if elsewhere else iterators))


def drawing(loader: Any) -> PipelineTask:
    """The same for what may draw with any batch: torch's samplers do so before the first one."""
    return _leading_to(*(one for one in _parts(loader, _MAX_WRAPPERS) if not _samples(one)))


def in_workers(loader: DataLoader[Any]) -> PipelineTask:
    """The same for what its worker processes use."""
    return _leading_to(loader.dataset, loader.collate_fn)


def _leading_to(*parts: Any) -> PipelineTask:
    return PipelineTask(LOADER, partial(_nothing, leads_to=parts))


def _nothing(ctx: Any, leads_to: object) -> None:
    """Do nothing."""


def _samples(part: Any) -> bool:
    return isinstance(part, Sampler) and is_foreign(type(part).__module__)


def _parts(loader: Any, wrappers: int, skipped: tuple[str, ...] = ()) -> Iterator[Any]:
    """The loader, or what it is made of where its code is a library's.

    A dataset whose items are read by worker processes is not used in this one.
    """
    if isinstance(loader, DataLoader):
        for name in _SAMPLING if loader.num_workers else _READING:
            skipped = _DATASETS if loader.num_workers else ()
            yield from _parts(getattr(loader, name, None), wrappers - 1, skipped)
    sampler = bool(skipped) and type(loader).__module__.startswith("torch.utils.data")
    if not (_of_library(loader) or sampler):
        yield loader
    elif wrappers and not isinstance(loader, DataLoader):
        for name, value in getattr(loader, "__dict__", {}).items():
            if name not in skipped:
                yield from _parts(value, wrappers - 1, skipped)


def _of_library(value: Any) -> bool:
    """Whether a search does not look into the code of the value's class, nor into the value."""
    module = type(value).__module__
    if is_foreign(module):  # all of it is searched, but for what only workers use
        return isinstance(value, DataLoader)
    return is_installed(getattr(sys.modules.get(module), "__file__", None))
