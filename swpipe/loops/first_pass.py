"""The report of a loop after its first pass: how much of the loader ran beside the body."""

from __future__ import annotations

import logging
import os
import time

_SHARE = 0.1
"""A share of the pulls: if fewer waited, and a core was spare, nothing is reported."""

_LONG_S = 1.0
"""Seconds: of a shorter pass it is not reported whether a core was spare."""

_SPARE = 0.2
"""A part of a core: if less than this was idle, no core was spare."""

_logger = logging.getLogger("swpipe")


class FirstPass:
    """A count of the pulls of a loop's first pass; methods are called by one thread at a time.

    Attributes:
        pulls: The number of pulls.
        waited: The number of pulls that waited for the body, because loader or body draws.
        seconds: The time that all pulls took.
        beside: The time of the pulls that ran beside the body.
    """

    def __init__(self) -> None:
        self.pulls = self.waited = 0
        self.seconds = self.beside = 0.0
        self._begun = time.perf_counter(), time.process_time()

    def note(self, seconds: float, *, alone: bool, waited: bool) -> None:
        """Count a pull that has ended."""
        self.pulls += 1
        self.waited += waited
        self.seconds += seconds
        self.beside += 0 if alone else seconds

    def tell(self, why: str) -> None:
        """Log a warning at the end of the pass if the loader gained little from running ahead.

        Args:
            why: Who draws random numbers, and what to declare.
        """
        lines = []
        if self.waited > _SHARE * self.pulls:
            lines.append(
                f"{self.waited} of {self.pulls} batches were made in turn with the body, since "
                f"{why}; {self.beside:.2g} of the {self.seconds:.2g} s that the loader took were "
                "beside it"
            )
        begun, used = self._begun
        # Without a spare core, a loader that runs beside the body slows the body down.
        wall = time.perf_counter() - begun
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        share = (time.process_time() - used) / wall
        if wall > _LONG_S and self.beside and cores and share > cores - _SPARE:
            lines.append(f"no core was spare: this process used {share:.1f} of {cores}")
        if lines:
            _logger.warning("swpipe: after the first pass: %s", "; ".join(lines))
