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
    """A count of the pulls of a loop's first pass; methods are called by one thread at a time."""

    def __init__(self) -> None:
        self._told = False
        self.begin()

    def begin(self) -> None:
        """Begin a pass; those before it were not complete, or were reported."""
        self._pulls = 0
        self._waited = 0  # pulls that waited for the body, because loader or body draws
        self._took_s = 0.0
        self._beside_s = 0.0  # the time of the pulls that ran beside the body
        self._begun_s = time.perf_counter()
        self._used_s = time.process_time()

    def note(self, begun_s: float, *, alone: bool, waited: bool) -> None:
        """Count a pull that ends now."""
        took_s = time.perf_counter() - begun_s
        self._pulls += 1
        self._waited += waited
        self._took_s += took_s
        self._beside_s += 0 if alone else took_s

    def tell(self, why: str) -> None:
        """Log a warning after the first complete pass if running ahead has gained little.

        Args:
            why: Who draws random numbers, and what to declare.
        """
        if self._told:
            return
        self._told = True
        lines = []
        if self._waited > _SHARE * self._pulls:
            lines.append(
                f"{self._waited} of {self._pulls} batches were made in turn with the body, since "
                f"{why}; {self._beside_s:.2g} of the {self._took_s:.2g} s that the loader took "
                "were beside it"
            )
        # Without a spare core, a loader that runs beside the body slows the body down.
        wall_s = time.perf_counter() - self._begun_s
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        share = (time.process_time() - self._used_s) / wall_s
        if wall_s > _LONG_S and self._beside_s and cores and share > cores - _SPARE:
            lines.append(f"no core was spare: this process used {share:.1f} of {cores}")
        if lines:
            _logger.warning("swpipe: after the first pass: %s", "; ".join(lines))
