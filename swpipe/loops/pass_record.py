"""The record of the pulls of one pass: what the loader has made, and what leads back to it.

    pull                1   2   3   4   5   6   7   8
    handed out                              ^
    kept to resume              [ 3   4   5   6 ]
    contents compared                   body: 6   7   8    ahead of the body

An entry is made at the end of a pull. Until the body has ended with its batch, the contents of the
batch are compared: nobody may write them before, and no later pull may make a batch in their
memory. Afterwards the entry leads a resumed loop back to this place in the pass, together with the
entries around it, until no state can need it any more.

The pass calls all methods under its lock, but for those that say otherwise.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

from swpipe.core.loaders import SEQUENCES, are_same
from swpipe.loops.batch_memory import Contents, has_checksums
from swpipe.loops.pass_generators import States, changed
from swpipe.loops.pulled_loader import PulledLoader

_COMPARED = 4
"""The minimum number of compared batches: a refilled buffer has given one or two equal batches
by chance."""

_ASKED = 8
"""The number of pulls from one request for the loader's state to the next."""


@dataclass(slots=True)
class Pull:
    """A pull that has given a batch.

    Attributes:
        contents: The contents of the batch as it was pulled.
        loader: The loader's own state before the pull; None if it has none, or was not asked.
        before: The states of the loader's generators before the pull; None if ``loader`` was read
            after the pull.
        after: The states of the loader's generators after the pull.
        batch: The batch, until it is given to the pipeline, or as long as it may be given again.
    """

    contents: Contents
    loader: Any
    before: States | None
    after: States = field(default_factory=dict)
    batch: Any = None

    def release(self) -> None:
        """Drop the batch, and keep what leads back to it."""
        self.batch = None
        self.contents.release()


class PassRecord:
    """The pulls of one pass that a check or a saved state may still need."""

    def __init__(self, of: PulledLoader) -> None:
        self._of = of
        self._may_come_again = of.goes_on or type(of.loader) in (list, tuple)
        self._compared = max(_COMPARED, of.workers)  # at least one batch of each worker
        self._pulls: dict[int, Pull] = {}  # by the number of the pull in the pass, from 1
        self._last = 0  # the number of the last pull
        self._of_body: list[Contents] = []
        self._in_use: list[Contents] = []  # the contents in use when the last pull began
        self._state: Any = None  # the loader's state before the next pull, if it was asked
        # The checksums that a resumed pass still has to find, by the number of the batch.
        self._coming: dict[int, Sequence[int]] = {}
        # A function for each part that was dropped and modified: whether all references are gone.
        self._gone: list[Callable[[], bool]] = []
        # The generators before and after the loader's iterator was made, and the loader's state.
        self._at_start: States = {}
        self._begun: States = {}
        self._loader_at_start: Any = None

    # ------------------------------------------------------------------ the beginning of a pass

    def begin(self) -> Iterator[Any]:
        """Begin a new pass, and return its batches."""
        of = self._of
        # The states are read before iter(loader): samplers may draw their seed in there.
        self._at_start = of.generators.read()
        batches: Iterator[Any] = iter(of.loader)
        # A loader of another kind than torch's may have no state before its first batch.
        if isinstance(of.loader, DataLoader):
            self._state = self.ask()
        self._loader_at_start = self._state
        self._begun = of.generators.read()
        return batches

    def begin_again(self, pulls: list[Pull], saved: Mapping[str, Any]) -> None:
        """Go on after pulls that were made again, up to the place where a state was saved."""
        handed_out = saved["batches"]
        self._at_start = saved["at_start"]
        self._loader_at_start = saved["loader_at_start"]
        self._last = handed_out
        self._pulls = dict(enumerate(pulls, handed_out - len(pulls) + 1))
        self._coming = dict(enumerate(saved["coming"], handed_out + 1))
        if saved["again"] or isinstance(self._of.loader, DataLoader):
            self._state = self.ask()
        self._begun = self._of.generators.read()

    def undo(self) -> None:
        """Set the draws back of a pass that has begun without any pull."""
        generators = self._of.generators
        # If a state changed after the start, other code has drawn: setting back would undo that.
        if not changed(self._begun, generators.read()):
            generators.write(self._at_start)

    def ask(self) -> Any:
        """Return the loader's own state now, without the lock; None if it has none."""
        return copy.deepcopy(self._of.loader.state_dict()) if self._of.has_state else None

    # ------------------------------------------------------------------------------- a pull

    def begin_pull(self, handed_out: int) -> None:
        """Note the batches in use when a pull begins: the pull must not write them.

        They are noted at the beginning because the body may be done with them at the end.
        """
        if self._of.data is not None:
            ahead = [pull.contents for pull in self._ahead(handed_out)]
            self._in_use = self._of_body + ahead

    def check_coming(self, number: int, batch: Any) -> None:
        """Raise an error if a batch is not as it was when the state was saved.

        Raises:
            ValueError: The batch differs.
        """
        saved = self._coming.pop(number, None)
        if saved is not None and not has_checksums(batch, saved):
            raise ValueError(
                f"batch {number} of the pass is not what it was when the state was saved. Tasks "
                "that ran ahead, or other code, have changed it in place, and the loader "
                f"({type(self._of.loader).__name__}) gives it again; or the loader gives others. "
                "Let the tasks make new values, resume with the data as it was; or, if other "
                "batches do not matter, say load_state_dict(state, check=False)"
            )

    def entry(self, number: int, batch: Any, before: States) -> Pull:
        """Return the entry of a pull that has just ended. Called without the lock.

        Args:
            number: The number of the pull in the pass, from 1.
            batch: Its batch.
            before: The states of the loader's generators before the pull.
        """
        contents = Contents(batch, containers=self._may_come_again)
        pull = Pull(contents, self._state, before, batch=batch)
        self._state = None
        # The loader's first state is read after its first pull: it may have none before.
        if self._of.has_state and not self._pulls and pull.loader is None:
            pull.loader = self.ask()
            pull.before = None
        elif number % _ASKED == 0:
            self._state = self.ask()
        return pull

    def add(self, number: int, pull: Pull, handed_out: int) -> None:
        """Add a pull.

        Raises:
            RuntimeError: The batch is in memory of an earlier batch that is still in use.
        """
        if any(earlier.is_used_again_by(pull.contents) for earlier in self._in_use):
            raise RuntimeError(
                "the loader has made a batch in the memory of an earlier one, which was "
                "pulled ahead and is still in use: let it make a new tensor for each batch"
            )
        self._pulls[number] = pull
        self._last = number
        # Entries that no state can need any more go, so that their number stays bounded.
        if number % _ASKED == 0:
            first = self._first(handed_out)
            self._pulls = {n: entry for n, entry in self._pulls.items() if n >= first}

    def give(self, number: int) -> Any:
        """Return a batch, to be given to the pipeline."""
        pull = self._pulls[number]
        batch = pull.batch
        if not self._may_come_again:
            pull.batch = None
        return batch

    # ------------------------------------------------------------------------------ the body

    def check_as_pulled(self, number: int, batch: Any) -> None:
        """Raise an error if a batch was written since the loader has made it."""
        pull = self._pulls.get(number)
        made_here = self._of.data is not None
        if made_here and pull is not None and not pull.contents.are_those_of(batch):
            raise RuntimeError(
                "a batch that was pulled ahead is not any more what the loader made: its memory "
                "was written, or its parts replaced, before the loop came to it. Let the loader "
                f"({type(self._of.loader).__name__}) make new tensors, arrays and containers for "
                "each batch, and write none of them after it has handed it out"
            )

    def begin_body(self, handed_out: int) -> None:
        """Note that the body has the batch that was handed out last."""
        pull = self._pulls.get(handed_out)
        if pull is not None:
            pull.release()
            self._of_body = [pull.contents]

    def end_body(self) -> None:
        """Note that the body has ended, and with it the use of its batch."""
        self._of_body = []

    def is_that_of(self, batches: list[Any], handed_out: int) -> bool:
        """Return whether a list still has the batches that were pulled ahead."""
        ahead = [pull.batch for pull in self._ahead(handed_out)]
        return are_same(ahead, batches[handed_out : handed_out + len(ahead)])

    # -------------------------------------------------------------------------- leaving a pass

    def leave(self, handed_out: int) -> None:
        """Note which dropped batches tasks that ran ahead have modified."""
        changed = (pull.contents.changed() for pull in self._ahead(handed_out))
        self._gone = [*map(_gone, chain.from_iterable(changed))]

    def release(self) -> None:
        """Drop all batches, and keep what leads back to them."""
        self._of_body = []
        self._in_use = []
        for pull in self._pulls.values():
            pull.release()

    def check_modified(self) -> None:
        """Raise an error if the loader may give batches again that were dropped and modified.

        A batch to which no reference is left cannot come again: the loader makes a new one.
        """
        # Weak references tell whether the loader still has the modified parts.
        if all(gone() for gone in self._gone):
            return
        gc.collect()  # free reference cycles, which would look as if the loader had the parts
        if not all(gone() for gone in self._gone):
            kind = type(self._of.loader).__name__
            raise RuntimeError(
                "tasks that ran ahead have modified batches that were dropped when the last pass "
                f"was left, and the loader ({kind}) would give them again: they would be "
                "modified twice. Let the tasks make new tensors, or the loader new batches in each "
                "pass"
            )

    # ------------------------------------------------------------------------- what a state has

    def up_to(self, handed_out: int) -> list[Pull]:
        """Return the pulls that lead to the batch handed out last, and are compared."""
        first = self._first(handed_out)
        return [pull for number, pull in self._pulls.items() if first <= number <= handed_out]

    def state_dict(self, handed_out: int, *, check: bool) -> dict[str, Any]:
        """Return the part of a state that leads back to the batch handed out last.

        Args:
            handed_out: The number of that batch.
            check: Whether to add the checksums that let a resumed loop refuse different batches.
        """
        pulls = self.up_to(handed_out)
        # The batches of a list, tuple or range may differ.
        checked = check and type(self._of.loader) not in SEQUENCES
        return {
            "at_start": self._at_start,
            "loader": pulls[0].loader if pulls else self._loader_at_start,
            "loader_at_start": self._loader_at_start,
            "again": [
                (pull.before, pull.contents.checksum if checked else None)
                for pull in pulls
                if pull.before is not None
            ],
            "coming": self._checksums_ahead(handed_out) if check else [],
        }

    def _checksums_ahead(self, handed_out: int) -> list[list[int]]:
        """Return the checksums, as pulled, of the batches after the one that was handed out last.

        Of a list or tuple, these are all batches that may be pulled before the pass is left: tasks
        change a batch only after its pull was added, which waits for the lock.
        """
        contents = [pull.contents for pull in self._ahead(handed_out)]
        if type(self._of.loader) in (list, tuple):
            rest = self._of.loader[handed_out + len(contents) : handed_out + self._of.most]
            contents += map(Contents, rest)
        return [batch.checksums for batch in contents]

    def _ahead(self, handed_out: int) -> list[Pull]:
        """Return the pulls after the batch that was handed out last."""
        return [self._pulls[number] for number in range(handed_out + 1, self._last + 1)]

    def _first(self, handed_out: int) -> int:
        """Return the latest pull that leaves enough batches to compare.

        If the loader has a state, it must be known before that pull.
        """
        first = handed_out - self._compared + 1
        if not self._of.has_state:
            return first
        known = [number for number, pull in self._pulls.items() if pull.loader is not None]
        return max((place for place in known if place <= first), default=min(known, default=0))


def _gone(part: Any) -> Callable[[], bool]:
    """Return a function that tells whether no reference to a part is left.

    A number or string may be shared by any code, and never counts as gone.
    """
    # The storage counts, not the tensor: a view in the loader keeps the memory alive. A sparse
    # tensor has no storage: torch._C._has_storage tells (private, torch 2.13).
    if isinstance(part, Tensor) and torch._C._has_storage(part):
        expired: Callable[[], bool] = StorageWeakRef(part.untyped_storage()).expired  # type: ignore[no-untyped-call]
        return expired
    if not type(part).__weakrefoffset__:
        return lambda: False
    while isinstance(getattr(part, "base", None), type(part)):  # a view of an array
        part = part.base
    reference = weakref.ref(part)
    return lambda: reference() is None
