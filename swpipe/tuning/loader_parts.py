"""What a loader does that matters if it is called ahead."""

from __future__ import annotations

import gc
import random
import sys
import threading
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from swpipe._state.discovery import attributes_of
from swpipe._state.generators import PYTHON, TORCH
from swpipe._state.reached import Reach
from swpipe._tensors.pytree import nodes_in, tensors_in
from swpipe.tuning.accelerate_loader import AccelerateLoader


def may_draw(code: Reach) -> set[str]:
    """The default generators that a loader's code may draw from, as effects name them.

    A DataLoader within draws its seed whenever it is begun.
    """
    found = set(code.draws)
    if "DataLoader" in code.names or any(
        isinstance(one, DataLoader) for one in code.holders.values()
    ):
        found.add(TORCH)
    if id(getattr(random.random, "__self__", None)) in code.holders:
        found.add(PYTHON)
    return found


def epochs_of(loader: Any) -> tuple[Any, ...]:
    """What a ``set_epoch`` of the loader or of its sampler or dataset has set."""
    loader = loader.prepared if isinstance(loader, AccelerateLoader) else loader
    parts = [loader]
    for name in ("sampler", "batch_sampler", "dataset"):
        part = getattr(loader, name, None)
        parts += [part, getattr(part, "sampler", None)]
    found = map(attributes_of, parts)
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
