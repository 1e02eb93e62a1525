"""How long this process's threads were ready to run and had no core, as Linux tells it.

Threads of one's own compete for cores too. So it is not the wait that says that another process
disturbed a visit, but that it is much longer than in the other visits of the same round.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

MUCH = 0.2
"""A visit is disturbed if so much more of its time was waited for a core than in the others."""

_TASKS = Path("/proc/self/task")


def waited_s() -> float | None:
    """Seconds that the threads which live now have waited for a core; None where Linux is silent.

    Kernels without schedstats, and other systems, do not tell.
    """
    total_ns, known = 0, False
    for thread in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended, or nothing is told
            _, wait_ns, _ = (thread / "schedstat").read_text().split()
            total_ns, known = total_ns + int(wait_ns), True
    return total_ns / 1e9 if known else None


def disturbed(shares: Sequence[float | None]) -> list[bool]:
    """Which visits of a round were disturbed.

    Args:
        shares: The wait of each visit as a part of its time; None where it is not known.
    """
    known = [share for share in shares if share is not None]
    usual = median(known) if known else 0.0
    return [share is not None and share > usual + MUCH for share in shares]
