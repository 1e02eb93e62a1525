"""What a loop says after its first pass: how much of the loader ran beside the body."""

from __future__ import annotations

import logging
import os
import time

_SHARE = 0.1
"""Nothing is said where fewer of the pulls waited, and a core was spare."""

_LONG_S = 1.0
"""Of a shorter pass it is not told whether a core was spare."""

_SPARE = 0.2
"""Of a core: the caller's thread, the loader's and torch's have used all but so much."""

_logger = logging.getLogger("swpipe")


class FirstPass:
    """Counts the pulls of a loop's first pass; one thread at a time is here.

    Attributes:
        pulls: How many there were.
        waited: How many of these waited for the body, because somebody draws.
        seconds: How long they took.
        beside: How long those took that ran beside the body.
    """

    def __init__(self) -> None:
        self.pulls = self.waited = 0
        self.seconds = self.beside = 0.0
        self._begun = time.perf_counter(), time.process_time()

    def note(self, seconds: float, *, alone: bool, waited: bool) -> None:
        """A pull has ended."""
        self.pulls += 1
        self.waited += waited
        self.seconds += seconds
        self.beside += 0 if alone else seconds

    def tell(self, why: str) -> None:
        """The pass has ended; ``why`` says who draws, and what to say."""
        lines = []
        if self.waited > _SHARE * self.pulls:
            lines.append(
                f"{self.waited} of {self.pulls} batches were made in turn with the body, since "
                f"{why}; {self.beside:.2g} of the {self.seconds:.2g} s that the loader took were "
                "beside it"
            )
        begun, used = self._begun
        wall = time.perf_counter() - begun
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        share = (time.process_time() - used) / wall
        if wall > _LONG_S and self.beside and cores and share > cores - _SPARE:
            lines.append(f"no core was spare: this process used {share:.1f} of {cores}")
        if lines:
            _logger.warning("swpipe: after the first pass: %s", "; ".join(lines))
