"""What a loader has beside its batches that outlives a pass: its place, its workers."""

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
    """Whether the loader is an iterator of Python's own, such as a generator, or of a DataLoader.

    A new pass goes on with it. An object of another class whose ``iter`` is itself may begin anew.
    """
    begin = getattr(type(loader), "__iter__", None)
    pythons = hasattr(type(loader), "__next__") and not hasattr(begin, "__code__")
    return pythons or isinstance(loader, _BaseDataLoaderIter)


def may_keep_rows(loader: Any) -> bool:
    """Whether code of the user's in this process may be past a batch that nobody got.

    A stream may go on in the next pass where it stopped, and a ``collate_fn`` keep rows for it.
    """
    loader = torchs(loader)
    if not isinstance(loader, DataLoader):
        return type(loader) not in SEQUENCES
    streams = isinstance(loader.dataset, IterableDataset)
    collates = loader.collate_fn not in (default_collate, default_convert)
    return loader.num_workers == 0 and (streams or collates)


def has_own_state(loader: Any) -> bool:
    """Whether it is set back by a state of its own.

    One that Accelerate prepared talks to the other processes when a pass begins, so all have to
    begin it alike: it is begun again.
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
    """Whether Accelerate has put its own around a loader of torchdata's."""
    prepared = isinstance(loader, AccelerateLoader) or is_prepared(loader)
    return prepared and has_state_dict(torchs(loader))


def has_place(loader: Any) -> bool:
    """Whether its place in a pass is known: by a state, or by how many batches it gave."""
    loader = torchs(loader)
    if isinstance(loader, DataLoader):
        return not isinstance(loader.dataset, IterableDataset) or has_state_dict(loader)
    return isinstance(loader, Sequence | Tensor) or has_state_dict(loader)


def torchs(loader: Any) -> Any:
    """The loader within what Accelerate and swpipe put around it."""
    return unprepared(loader.prepared if isinstance(loader, AccelerateLoader) else loader)


def lives_on(loader: Any) -> bool:
    """Whether its worker processes live on from pass to pass."""
    loader = torchs(loader)
    return isinstance(loader, DataLoader) and loader.persistent_workers


def has_live_workers(loader: Any) -> bool:
    """Whether worker processes of an earlier pass are used again, with what they drew and kept."""
    return lives_on(loader) and torchs(loader)._iterator is not None


def end_workers(loader: Any) -> None:
    """Let the next pass have new workers, as the first one has."""
    if has_live_workers(loader):
        torchs(loader)._iterator = None


def length_of(loader: Any) -> float:
    """How many batches it says it has; infinity if it does not."""
    try:
        return len(loader)
    except TypeError:
        return float("inf")
