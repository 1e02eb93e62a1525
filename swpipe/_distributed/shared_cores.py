"""The cores that this process may run on, and how many ranks of its job share them."""

from __future__ import annotations

import os


def cores() -> int:
    """How many cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def ranks_on_machine() -> int:
    """How many ranks share this machine's cores, as torchrun tells it; 1 where it does not."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(told)) if told.isdecimal() else 1
