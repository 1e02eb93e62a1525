"""The properties of a loader that outlive a pass: its place, its workers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert
from torch.utils.data.dataloader import _BaseDataLoaderIter

from swpipe._values.stateful import has_state_dict
from swpipe.core.loaders import SEQUENCES, unprepared
from swpipe.loops.accelerate import AccelerateLoader, is_prepared


def goes_on(loader: Any) -> bool:
    """Return whether the loader is an iterator of Python's own or of a DataLoader.

    A new pass continues with it. An object of another class whose ``iter`` returns itself may begin
    each pass anew.
    """
    # A built-in __iter__ has no __code__: that of a generator, or of iter() of a container. An
    # __iter__ that is written in Python may do anything, such as begin again.
    begin = getattr(type(loader), "__iter__", None)
    pythons = hasattr(type(loader), "__next__") and not hasattr(begin, "__code__")
    return pythons or isinstance(loader, _BaseDataLoaderIter)


def may_keep_rows(loader: Any) -> bool:
    """Return whether the user's code in this process may be past a batch that was not handed out.

    A stream may continue in the next pass where it stopped, and a ``collate_fn`` may keep rows.
    """
    loader = torchs(loader)
    if not isinstance(loader, DataLoader):
        return type(loader) not in SEQUENCES
    streams = isinstance(loader.dataset, IterableDataset)
    collates = loader.collate_fn not in (default_collate, default_convert)
    return loader.num_workers == 0 and (streams or collates)


def has_own_state(loader: Any) -> bool:
    """Return whether the loader is set back by a state of its own.

    A loader that Accelerate prepared is not: it communicates when a pass begins, so all ranks have
    to begin the pass in the same way, which is to begin it again.
    """
    return has_state_dict(loader) and not is_prepared(loader)


def with_state(loader: Any) -> Any:
    """Return the loader, or a ``StatefulLoader`` of it if its iterators have ``get_state``."""
    if has_state_dict(loader):
        return loader
    grain = sys.modules.get("grain")
    names = ("IterDataset", "DataLoader")
    makes = tuple(getattr(grain, name) for name in names if hasattr(grain, name))
    methods = ("get_state", "set_state")
    has_methods = all(callable(getattr(type(loader), name, None)) for name in methods)
    if has_methods or isinstance(loader, makes):
        from swpipe.loops.stateful_loader import StatefulLoader

        return StatefulLoader(loader)
    return loader


def is_prepared_with_state(loader: Any) -> bool:
    """Return whether Accelerate has wrapped a loader of torchdata's."""
    prepared = isinstance(loader, AccelerateLoader) or is_prepared(loader)
    return prepared and has_state_dict(torchs(loader))


def has_place(loader: Any) -> bool:
    """Return whether a loader's place in a pass is known, by a state or a number of batches."""
    loader = torchs(loader)
    if isinstance(loader, DataLoader):
        return not isinstance(loader.dataset, IterableDataset) or has_state_dict(loader)
    return isinstance(loader, Sequence | Tensor) or has_state_dict(loader)


def torchs(loader: Any) -> Any:
    """Return the loader inside the wrappers of Accelerate and swpipe."""
    return unprepared(loader.prepared if isinstance(loader, AccelerateLoader) else loader)


def lives_on(loader: Any) -> bool:
    """Return whether the loader's worker processes live on from pass to pass."""
    loader = torchs(loader)
    return isinstance(loader, DataLoader) and loader.persistent_workers


def has_live_workers(loader: Any) -> bool:
    """Return whether workers of an earlier pass are used again, with what they drew and kept."""
    # DataLoader._iterator (private, torch 2.13) is set while persistent workers live.
    return lives_on(loader) and torchs(loader)._iterator is not None


def end_workers(loader: Any) -> None:
    """Make the next pass start new workers, as the first pass does."""
    if has_live_workers(loader):
        # The last reference: the iterator shuts its workers down when it is collected.
        torchs(loader)._iterator = None


def length_of(loader: Any) -> float:
    """Return the loader's length in batches; infinity if it has none."""
    try:
        return len(loader)
    except TypeError:
        return float("inf")
