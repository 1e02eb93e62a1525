"""The batches that were pulled ahead of the loop's body, as they were pulled."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from typing import Any

from swpipe.core.loaders import are_same
from swpipe.loops.batch_memory import BatchAsPulled, Watched
from swpipe.loops.live_loaders import goes_on


class BatchesAhead:
    """Those of one pass, oldest first. The pass sees to it that one thread at a time is here.

    Args:
        loader: The loader.
        makes_batches: Whether its code in this process makes the batches.
    """

    def __init__(self, loader: Any, *, makes_batches: bool) -> None:
        self._kind = type(loader).__name__
        self._makes = makes_batches
        self._holds = type(loader) in (list, tuple)  # its batches
        self._keeps = self._holds or goes_on(loader)
        self._batches: deque[BatchAsPulled] = deque()
        self._of_body: list[BatchAsPulled] = []
        self._modified: list[Watched] = []  # what was dropped and is not as it was pulled

    def as_pulled(self, batch: Any) -> BatchAsPulled | None:
        """A batch as it is now; None where nobody asks for it."""
        if self._makes or self._holds:
            return BatchAsPulled(batch, keep=self._keeps)
        return None

    def add(self, pulled: BatchAsPulled | None) -> None:
        """A batch was pulled.

        Raises:
            RuntimeError: It is in the memory of an earlier one that tasks or the body may use.
        """
        if pulled is None:
            return
        for earlier in (*self._of_body, *self._batches) if self._makes else ():
            if earlier.is_used_again_by(pulled):
                raise RuntimeError(
                    "the loader has made a batch in the memory of an earlier one, which was "
                    "pulled ahead and is still in use: let it make a new tensor for each batch"
                )
        self._batches.append(pulled)

    def hand_out(self) -> None:
        """The body gets the oldest."""
        self._of_body = [self._batches.popleft()] if self._batches else []

    def are_those_of(self, batches: list[Any], begin: int) -> bool:
        """Whether a list still has them, from this place on."""
        now = batches[begin : begin + len(self._batches)]
        return are_same([pulled.batch for pulled in self._batches], now)

    def leave(self) -> Iterator[Any]:
        """They are dropped; returns those that are kept."""
        modified = [part for pulled in self._batches for part in pulled.changed()]
        self._modified = [Watched(part) for part in modified]
        return (pulled.batch for pulled in self._batches)

    def clear(self) -> None:
        """Let them go."""
        self._batches.clear()
        self._of_body.clear()

    def check_modified(self) -> None:
        """Refuse to go on where the loader has batches that were dropped, and may give them again.

        What it makes anew has gone with the pass.

        Raises:
            RuntimeError: It has, and tasks that ran ahead have modified them.
        """
        if not any(one.is_there for one in self._modified):
            return
        gc.collect()  # what only refers to itself is nobody's
        if any(one.is_there for one in self._modified):
            raise RuntimeError(
                "tasks that ran ahead have modified batches that were dropped when the last pass "
                f"was left, and the loader ({self._kind}) would give them again: they would be "
                "modified twice. Let the tasks make new tensors, or the loader new batches in each "
                "pass"
            )
