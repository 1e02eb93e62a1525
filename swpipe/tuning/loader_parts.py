"""What of a loader works in this process, and what it is made of."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from swpipe._state.discovery import is_foreign, is_installed
from swpipe._state.draws import TORCH
from swpipe._state.reached import Reach
from swpipe._tensors.pytree import nodes_in, tensors_in
from swpipe.core.task import PipelineTask
from swpipe.tuning.accelerate_loader import AccelerateLoader

LOADER = "the loader"

MAX_WRAPPERS = 4
"""How many objects of installed libraries are looked into, one in the other."""

_SAMPLING = ("batch_sampler", "sampler", "generator")
_READING = ("dataset", "collate_fn", *_SAMPLING)
_DATASETS = ("dataset", "data_source")


def reaching(loader: Any, *iterators: Any) -> PipelineTask:
    """A task that does nothing, and whose code leads to what the loader and its iterators use."""
    if isinstance(loader, AccelerateLoader):
        loader, iterators = loader.prepared, ()
    parts = (*_parts(loader, MAX_WRAPPERS), *(() if _reads_elsewhere(loader) else iterators))
    return _leading_to(parts)


def drawing(loader: Any) -> PipelineTask:
    """The same for what may draw with any batch: torch's samplers do so before the first one."""
    if isinstance(loader, AccelerateLoader):
        loader = loader.prepared
    return _leading_to(tuple(one for one in _parts(loader, MAX_WRAPPERS) if not _samples(one)))


def _leading_to(parts: tuple[Any, ...]) -> PipelineTask:
    def reach(ctx: Any, leads_to: object = parts) -> None:
        """Nothing."""

    return PipelineTask(LOADER, reach)


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


def _reads_elsewhere(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers > 0


def may_draw(code: Reach) -> set[str]:
    """The default generators that a loader's code may draw from, as effects name them.

    A DataLoader within draws its seed whenever it is begun.
    """
    inner = any(isinstance(one, DataLoader) for one in code.holders.values())
    return code.draws | ({TORCH} if inner or "DataLoader" in code.names else set())


def epochs_of(loader: Any) -> tuple[Any, ...]:
    """What a ``set_epoch`` of the loader or of its sampler or dataset has set."""
    loader = loader.prepared if isinstance(loader, AccelerateLoader) else loader
    parts = [loader]
    for name in ("sampler", "batch_sampler", "dataset"):
        part = getattr(loader, name, None)
        parts += [part, getattr(part, "sampler", None)]
    found = [getattr(part, "__dict__", {}) for part in parts]
    return tuple((names.get("epoch"), names.get("iteration")) for names in found)


def bound_to_thread(reach: Reach) -> str:
    """The type of something in reach that only the thread that made it can use; else empty."""
    sqlite: Any = sys.modules.get("sqlite3")
    types = (threading.local, *((sqlite.Connection, sqlite.Cursor) if sqlite else ()))
    found = [type(one).__name__ for one in reach.holders.values() if isinstance(one, types)]
    return found[0] if found else ""


def goes_on(loader: Any) -> bool:
    """Whether the loader is an iterator whose ``iter`` does nothing: a new pass goes on with it."""
    begin = getattr(type(loader), "__iter__", None)
    if begin is None or not hasattr(type(loader), "__next__"):
        return False
    code = getattr(begin, "__code__", None)
    return code is None or not code.co_names  # written in C, or ``return self``


def keeps(reach: Reach, batch: Any) -> bool:
    """Whether the loader keeps the batch or its memory, in more than a generator's variable.

    ``for batch in ...: yield batch`` holds a batch only until the next one.
    """
    tensors = {id(tensor): tensor for tensor in tensors_in(batch)}
    holders = [one for one in reach.holders.values() if not isinstance(one, GeneratorType)]
    held = [one for one in holders if isinstance(one, Tensor) and id(one) not in tensors]
    if {_memory(one) for one in held} & {_memory(one) for one in tensors.values()} - {0}:
        return True
    known = {id(one) for one in holders} | {id(getattr(one, "__dict__", 0)) for one in holders}
    parts = _parts_of(batch)
    known -= {id(part) for part in parts}
    return any(id(one) in known for one in gc.get_referrers(*parts))


def keeps_in_variable(reach: Reach, batch: Any) -> bool:
    """Whether a variable of a generator has the batch, or something of it."""
    parts = {id(part) for part in _parts_of(batch)}
    frames = [getattr(one, "gi_frame", None) for one in reach.holders.values()]
    names = [frame.f_locals for frame in frames if frame is not None]
    return any(id(value) in parts for of_frame in names for value in of_frame.values())


def _parts_of(batch: Any) -> list[Any]:
    return [*tensors_in(batch), *(node.value for node in nodes_in(batch))]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
