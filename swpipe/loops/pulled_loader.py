"""A loader of a loop: what it is, by its type, and how its passes are pulled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert
from torch.utils.data.dataloader import _BaseDataLoaderIter

from swpipe._values.stateful import has_state_dict
from swpipe.accelerate_check import is_prepared
from swpipe.core.loaders import SEQUENCES, unprepared
from swpipe.loops.accelerate import AccelerateLoader
from swpipe.loops.draws import LoaderDraws
from swpipe.loops.loader_data import LoaderData
from swpipe.loops.pass_generators import PassGenerators
from swpipe.loops.pull_times import PullTimes


@dataclass(frozen=True)
class PulledLoader:
    """A loader, and how its passes are pulled.

    Attributes:
        loader: The loader.
        generators: The random generators whose states are saved and compared.
        draws: The record of who uses these generators.
        ahead: Whether batches are pulled while earlier batches are in use.
        data: The loader's data, if code of the loader makes batches in this process while the body
            runs; else None.
        times: The times of the pulls, if batches are pulled beside the body; else None.
    """

    loader: Any
    generators: PassGenerators
    draws: LoaderDraws
    ahead: bool
    data: LoaderData | None = None
    times: PullTimes | None = None

    @cached_property
    def inner(self) -> Any:
        """The loader inside the wrappers of Accelerate and swpipe."""
        return unprepared(self.loader)

    @cached_property
    def goes_on(self) -> bool:
        """Whether the loader is an iterator of Python's own or of a DataLoader.

        A new pass continues with it. An object of another class whose ``iter`` returns itself may
        begin each pass anew.
        """
        # A built-in __iter__ has no __code__: that of a generator, or of iter() of a container. An
        # __iter__ that is written in Python may do anything, such as begin again.
        kind = type(self.loader)
        written = hasattr(getattr(kind, "__iter__", None), "__code__")
        pythons = hasattr(kind, "__next__") and not written
        return pythons or isinstance(self.loader, _BaseDataLoaderIter)

    @cached_property
    def workers(self) -> int:
        """The number of the loader's worker processes."""
        return self.inner.num_workers if isinstance(self.inner, DataLoader) else 0

    @property
    def may_keep_rows(self) -> bool:
        """Whether the user's code in this process may be past a batch that was not handed out.

        A stream may continue in the next pass where it stopped, and a ``collate_fn`` may keep rows.
        """
        loader = self.inner
        # Any other iterable may be a stream: only a list, tuple or range begins anew for certain.
        if not isinstance(loader, DataLoader):
            return type(loader) not in SEQUENCES
        streams = isinstance(loader.dataset, IterableDataset)
        collates = loader.collate_fn not in (default_collate, default_convert)
        # What worker processes keep is not in this process.
        return not self.workers and (streams or collates)

    @cached_property
    def has_state(self) -> bool:
        """Whether the loader is set back by a state of its own.

        A loader that Accelerate prepared is not: it communicates when a pass begins, so all ranks
        have to begin the pass in the same way, which is to begin it again.
        """
        return has_state_dict(self.loader) and not is_prepared(self.loader)

    @property
    def is_prepared_with_state(self) -> bool:
        """Whether Accelerate has wrapped a loader of torchdata's."""
        prepared = isinstance(self.loader, AccelerateLoader) or is_prepared(self.loader)
        return prepared and has_state_dict(self.inner)

    @property
    def has_place(self) -> bool:
        """Whether the place in a pass is known, by a state or a number of batches."""
        loader = self.inner
        # A number of batches leads back to the same place only where batches have an order of their
        # own; a stream may have moved on.
        streams = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
        counts = isinstance(loader, DataLoader | Sequence | Tensor) and not streams
        return counts or has_state_dict(loader)

    @property
    def lives_on(self) -> bool:
        """Whether the loader's worker processes live on from pass to pass."""
        return isinstance(self.inner, DataLoader) and self.inner.persistent_workers

    @property
    def has_live_workers(self) -> bool:
        """Whether workers of an earlier pass are used again, with what they drew and kept."""
        # DataLoader._iterator (private, torch 2.13) is set while persistent workers live.
        return self.lives_on and self.inner._iterator is not None

    def end_workers(self) -> None:
        """Make the next pass start new workers, as the first pass does."""
        if self.has_live_workers:
            # The last reference: the iterator shuts its workers down when it is collected.
            self.inner._iterator = None

    @property
    def length(self) -> float:
        """The loader's length in batches; infinity if it has none."""
        try:
            return len(self.loader)
        except TypeError:
            return float("inf")
