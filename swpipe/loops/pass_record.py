"""The record of the pulls of one pass: what the loader has made, and what leads back to it.

    pull                1   2   3   4   5   6   7   8
    handed out                              ^
    a state                     2                          place: the number of pulls before it
    kept to resume              [ 3   4   5   6 ]          pulled again from there, and compared
    contents compared                   body: 6   7   8    ahead of the body

An entry is made at the end of a pull. Until the body has ended with its batch, the contents of the
batch are compared: nobody may write them before, and no later pull may make a batch in their
memory. Afterwards the entry leads a resumed loop back to this place in the pass, together with the
entries around it, until no state can need it any more. A loader with a state of its own is asked
for it now and then; of any other loader, each number of pulls is a place.

The pass calls all methods under its lock, but for those that say otherwise.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

from swpipe.core.loaders import SEQUENCES
from swpipe.loops.batch_memory import Contents
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
        before: The states of the loader's generators before the pull.
        after: The states of the loader's generators after the pull.
        batch: The batch, until it is given to the pipeline, or as long as it may be given again.
    """

    contents: Contents
    before: States
    after: States = field(default_factory=dict)
    batch: Any = None

    def release(self) -> None:
        """Drop the batch, and keep what leads back to it."""
        self.batch = None
        self.contents.release()


class PassRecord:
    """The pulls of one pass that a check or a saved state may still need.

    Attributes:
        last: The number of the last pull in the pass, from 1; 0 before it.
        first: The number of the iteration that has the first batch of the pass; set by the pass.
        sampling: What known samplers read in mid-pass, as it was at the first request; set by the
            pass.
        lost: Whether batches that were pulled ahead were dropped, and do not come again; set by the
            pass.
        had_live_workers: Whether the pass uses worker processes of an earlier pass.
    """

    def __init__(self, of: PulledLoader) -> None:
        self.last = 0
        self.first = 0
        self.sampling: list[Any] = []
        self.lost = False
        self.had_live_workers = of.has_live_workers
        self._of = of
        self._may_come_again = of.goes_on or type(of.loader) in (list, tuple)
        self._pulls: dict[int, Pull] = {}  # by the number of the pull in the pass
        # The contents that nobody may write: of the pulls that the body has, or will have.
        self._in_use: dict[int, Contents] = {}
        # A function for each part that was dropped and modified: whether all references are gone.
        self._gone: list[Callable[[], bool]] = []
        # The generators before the loader's iterator was made, and after it in a new pass; and the
        # loader's states: at the beginning of the pass, and by the place to which they lead.
        self._at_start: States = {}
        self._begun: States = {}
        self._loader_at_start: Any = None
        self._states: dict[int, Any] = {}

    # ------------------------------------------------------------------ the beginning of a pass

    def begin(self) -> Iterator[Any]:
        """Begin a new pass, and return its batches."""
        of = self._of
        # The states are read before iter(loader): samplers may draw their seed in there.
        self._at_start = of.generators.read()
        batches: Iterator[Any] = iter(of.loader)
        # A loader of another kind than torch's may have no state before its first batch.
        if isinstance(of.loader, DataLoader):
            self._loader_at_start = self.ask()
            self._states[0] = self._loader_at_start
        self._begun = of.generators.read()
        return batches

    def begin_again(self, pulls: list[Pull], loader: Any, saved: Mapping[str, Any]) -> None:
        """Go on after pulls that were made again, up to the place where a state was saved.

        Args:
            pulls: The pulls.
            loader: The loader's state before them; None if it has none.
            saved: The state.
        """
        of = self._of
        handed_out = saved["batches"]
        self._at_start = saved["at_start"]
        self._loader_at_start = saved["loader_at_start"]
        self.last = handed_out
        self._states = {handed_out - len(pulls): loader}
        if pulls or isinstance(of.loader, DataLoader):
            self._states[handed_out] = self.ask()
        # The generators as a running loop would have them: the loader's after its last pull, and
        # all others at the save.
        after = {**saved["generators"], **(saved["after_pull"] or {})}
        of.generators.write(after)
        # The last pull is that of the batch handed out last: a save may follow at once.
        pulls = pulls or [Pull(Contents(None), {})]
        pulls[-1].after = after
        self._pulls = dict(enumerate(pulls, handed_out - len(pulls) + 1))

    def undo(self) -> None:
        """Set the draws back of a new pass that has begun without any pull."""
        generators = self._of.generators
        # If a state changed after the start, other code has drawn: setting back would undo that.
        if self._begun and not changed(self._begun, generators.read()):
            generators.write(self._at_start)

    def ask(self) -> Any:
        """Return the loader's own state now, without the lock; None if it has none."""
        return copy.deepcopy(self._of.loader.state_dict()) if self._of.has_state else None

    # ------------------------------------------------------------------------------- a pull

    @property
    def in_use(self) -> list[Contents]:
        """The contents in use now; a pull that begins now must not write them."""
        return [*self._in_use.values()]

    def entry(self, number: int, batch: Any, before: States) -> Pull:
        """Return the entry of a pull that has just ended. Called without the lock.

        Args:
            number: The number of the pull in the pass, from 1.
            batch: Its batch.
            before: The states of the loader's generators before the pull.
        """
        if number % _ASKED == 0 or not self._states:
            self._states[number] = self.ask()
        return Pull(Contents(batch, containers=self._may_come_again), before, batch=batch)

    def add(self, number: int, pull: Pull, in_use: list[Contents], handed_out: int) -> None:
        """Add a pull.

        Args:
            number: The number of the pull in the pass, from 1.
            pull: The pull.
            in_use: What was in use when the pull began: the body may be done with it by now.
            handed_out: The number of the batch handed out last.

        Raises:
            RuntimeError: The batch is in memory of an earlier batch that is still in use.
        """
        if self._of.data is not None:
            if any(earlier.is_used_again_by(pull.contents) for earlier in in_use):
                raise RuntimeError(
                    f"the loader ({type(self._of.loader).__name__}) has made batch {number} of the "
                    "pass in the memory of an earlier one, which was pulled ahead and is still in "
                    "use: let it make a new tensor for each batch, or use more buffers in turn"
                )
            self._in_use[number] = pull.contents
        self._pulls[number] = pull
        self.last = number
        # What no saved state can need any more goes, so that it stays bounded.
        if number % _ASKED == 0:
            place = self._place(handed_out)
            self._pulls = {n: entry for n, entry in self._pulls.items() if n >= place}
            self._states = {n: state for n, state in self._states.items() if n >= place}

    def give(self, number: int) -> Any:
        """Return a batch, to be given to the pipeline."""
        pull = self._pulls[number]
        batch = pull.batch
        if not self._may_come_again:
            pull.batch = None
        return batch

    # ------------------------------------------------------------------------------ the body

    def check_as_pulled(self, iteration: int, batch: Any) -> None:
        """Raise an error if an iteration's batch was written since the loader has made it."""
        number = iteration - self.first + 1
        pull = self._pulls.get(number)
        if pull is not None and not pull.contents.are_those_of(batch):
            raise RuntimeError(
                f"batch {number} of the pass was pulled ahead and is not any more what the loader "
                "made: its memory was written, or its parts replaced, before the loop came to it. "
                f"Let the loader ({type(self._of.loader).__name__}) make new tensors, arrays and "
                "containers for each batch, and write none of them after it has handed it out"
            )

    def begin_body(self, handed_out: int) -> None:
        """Note that the body has the batch that was handed out last."""
        pull = self._pulls.get(handed_out)
        if pull is not None:
            pull.release()

    def end_body(self, handed_out: int) -> None:
        """Note that the body has ended, and with it the use of its batch."""
        self._in_use.pop(handed_out, None)

    # -------------------------------------------------------------------------- leaving a pass

    def leave(self, handed_out: int) -> None:
        """Note which dropped batches tasks that ran ahead have modified."""
        changed = (pull.contents.changed() for pull in self.ahead(handed_out))
        self._gone = [*map(_gone, chain.from_iterable(changed))]

    def release(self) -> None:
        """Drop all batches, and keep what leads back to them."""
        self._in_use.clear()
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

    def after(self, handed_out: int) -> States:
        """Return the states of the generators after the pull of the batch handed out last."""
        pull = self._pulls.get(handed_out)
        return {} if pull is None else pull.after

    def state_dict(self, handed_out: int, *, check: bool) -> dict[str, Any]:
        """Return the part of a state that leads back to the batch handed out last.

        Args:
            handed_out: The number of that batch.
            check: Whether to add the checksums that let a resumed loop refuse different batches.
        """
        place = self._place(handed_out)
        pulls = [pull for number, pull in self._pulls.items() if place < number <= handed_out]
        # The batches of a list, tuple or range may differ.
        checked = check and type(self._of.loader) not in SEQUENCES
        return {
            "at_start": self._at_start,
            "loader": self._states.get(place),
            "loader_at_start": self._loader_at_start,
            "again": [(pull.before, pull.contents.checksum if checked else None) for pull in pulls],
        }

    def ahead(self, handed_out: int) -> list[Pull]:
        """Return the pulls after the batch that was handed out last."""
        return [self._pulls[number] for number in range(handed_out + 1, self.last + 1)]

    def _place(self, handed_out: int) -> int:
        """Return the latest place that leaves enough batches to compare."""
        # At least one batch of each worker is compared.
        place = max(0, handed_out - max(_COMPARED, self._of.workers))
        if not self._of.has_state:
            return place
        # copy() is atomic: the thread that pulls adds a state without the lock.
        known = [number for number in self._states.copy() if number <= handed_out]
        enough = [number for number in known if number <= place]
        return max(enough) if enough else min(known, default=handed_out)


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
