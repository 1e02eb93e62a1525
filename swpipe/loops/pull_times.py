"""The times of the pulls of a pass: a report after the first pass, and a rule for the later ones.

A loader that is ahead of the body hides at most its own time. If all pulls of a pass took less than
the threads of the next pass take to start, as many pulls of that pass are serial: it starts no
thread, unless it has more batches. In a long pass, pulls that take less on average than to hand a
batch over from one thread to another are serial, too.
"""

from __future__ import annotations

import logging
import os
import time

from swpipe._distributed.rank_checks import is_alone

_SHARE = 0.1
"""A share of the pulls: if fewer waited, and a core was spare, nothing is reported."""

_LONG_S = 1.0
"""Seconds: of a shorter pass it is not reported whether a core was spare."""

_SPARE = 0.2
"""A part of a core: if less than this was idle, no core was spare."""

_START_S = 1e-3
"""Seconds that the threads of a pass take to start and to end, and its run to be made."""

_QUICK_S = 5e-5
"""Seconds that the hand-over of a batch takes on both threads. Pulls that take less on average gain
nothing by being ahead. Long ones among them count in the average: what is lost by not hiding them
is never more than what their hand-overs would have taken."""

_MANY = 64
"""The number of pulls of a pass after which their average counts."""

_logger = logging.getLogger("swpipe")


class PullTimes:
    """The times of the pulls of one pass; methods are called by one thread at a time.

    Attributes:
        serial: The number of pulls of a pass that are not worth a thread.
        quick: Whether the next pulls of the pass are not worth a hand-over.

    Args:
        only_pulls: Whether the loop's threads do nothing but pull.
    """

    def __init__(self, *, only_pulls: bool = False) -> None:
        self.serial = 0
        self._only_pulls = only_pulls
        self._reported = False
        self.begin()

    def begin(self) -> None:
        """Begin a pass."""
        self.quick = False
        # Ranks agree at each pull that is ahead, so all of them have to make the same pulls ahead:
        # the time of this rank's pulls must not decide.
        self._may_be_serial = self._only_pulls and is_alone()
        if not self._may_be_serial:
            self.serial = 0
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
        # Starting and ending threads takes as long as many pulls: the way back is twice as far.
        limit_s = 2 * _QUICK_S if self.quick else _QUICK_S
        many = self._may_be_serial and self._pulls >= _MANY
        self.quick = many and self._took_s < limit_s * self._pulls

    def end(self, why: str) -> None:
        """End a complete pass; log a warning after the first one if running ahead gained little.

        Args:
            why: Who draws random numbers, and what to declare.
        """
        self.serial = self._pulls if self._took_s < _START_S else 0
        if self._reported:
            return
        self._reported = True
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
