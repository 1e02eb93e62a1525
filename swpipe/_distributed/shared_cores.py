"""The cores that this process may run on, and the number of ranks that share them."""

from __future__ import annotations

import os


def cores() -> int:
    """Return the number of cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def ranks_on_machine() -> int:
    """Return the number of ranks on this machine, as torchrun sets it; 1 if it is not set."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(count)) if count.isdecimal() else 1
