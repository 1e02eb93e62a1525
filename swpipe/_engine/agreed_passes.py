"""The passes over a pipeline's data on whose steps its ranks agree.

A run pulls its batches from one of these:

    one rank                       the caller's iterator
    several ranks                  an ``EvenIterator`` over it, which ends, or raises, at the same
                                   step on all ranks
    next run, the same iterator    the same ``EvenIterator``, which has pulled batches for later
                                   steps
    ranks out of step              none: the collectives of the ranks would not match
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swpipe._distributed.batches_left import KnowsItsEnd, batches_left
from swpipe._distributed.even_data import EvenData, EvenIterator
from swpipe._distributed.rank_checks import is_alone
from swpipe._engine.iterations import PushedBatches
from swpipe.core.plan import PULL
from swpipe.program import Program


class AgreedPasses:
    """The agreed passes of one pipeline.

    Attributes:
        last: The pass that was used last; None if it cannot be continued.
        out_of_step: Why no iteration can run any more; empty while the ranks are in step.

    Args:
        program: The pipeline's program.
        stall_timeout_s: The time-out of the pipeline's watchdog; None for no limit.
    """

    def __init__(self, program: Program, stall_timeout_s: float | None) -> None:
        self.last: EvenIterator | None = None
        self.out_of_step = ""
        self._even: EvenData | None = None
        self._overlaps = program.depth > 1
        # Its time-out is shorter than the watchdog's, because its error names the ranks that are
        # missing.
        self._timeout_s = 600.0 if stall_timeout_s is None else 0.9 * stall_timeout_s
        # The watchdog limits pulls within a call. A thread that pulls between two calls needs its
        # own limit.
        self._limited = stall_timeout_s is not None and PULL in program.instructions

    @property
    def waiting(self) -> int:
        """The number of batches that were pulled for later steps."""
        return 0 if self.last is None else self.last.waiting

    def source(self, iterator: Iterator[Any], length: int | None) -> Iterator[Any]:
        """Return the iterator that a run pulls from.

        Args:
            iterator: The caller's iterator.
            length: Its number of batches, if it is known and the iterator does not provide it.

        Raises:
            RuntimeError: The ranks are out of step.
        """
        if self.out_of_step:
            raise RuntimeError(
                f"the ranks are out of step, and their collectives would not match any more: "
                f"{self.out_of_step}. Close the pipeline, and start the job again on all ranks"
            )
        agreed_there = isinstance(iterator, KnowsItsEnd) and iterator.agreed
        if isinstance(iterator, PushedBatches) or agreed_there or is_alone():
            return iterator
        if self._even is None:
            # The answers of the ranks take a round trip: a pipeline awaits them one step later.
            self._even = EvenData("error", ahead=int(self._overlaps), timeout_s=self._timeout_s)
        if self.last is None or self.last.over or self.last.source is not iterator:
            self.last = EvenIterator(
                self._even,
                iterator,
                length=batches_left(iterator) if length is None else length,
                keeps_step=self._overlaps,
                limited=self._limited,
            )
        self.last.left = False
        return self.last

    def close(self, *, forked: bool) -> None:
        """Drop the last pass, and destroy the process group, except in a forked child."""
        self.last = None
        even = self._even
        self._even = None
        if even is not None and not forked:
            even.close()
