"""The number of cores that other processes use during a measurement, as Linux reports it.

    all processes    |== own tree ==|== others ==|....... idle .......|
                     of the cores that this process may run on

The own tree is this process and all processes that it has started, such as a loader's workers. The
ranks of one job on the same machine have a common parent, and do not count as other processes.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from swpipe._distributed.rank_checks import is_alone

MUCH = 0.1
TOO_MUCH = 0.25
"""Fractions of the cores. If other processes use more than the first, the machine is busy; if
they use more than the second, it is too busy for a useful measurement.
"""

_PROC = Path("/proc")
# Columns of /proc/stat. Guest time is also part of user time, so it must not be added again.
_IDLE = 3
_IO_WAIT = 4
_GUEST = 8


@dataclass(frozen=True, slots=True)
class OtherLoad:
    """The mean number of cores that other processes used, of the cores this process may use."""

    used: float
    cores: int

    @property
    def is_busy(self) -> bool:
        """Whether times are longer than they would be on an idle machine."""
        return self.used > MUCH * self.cores

    @property
    def is_too_busy(self) -> bool:
        """Whether the measurements say more about other processes than about this one."""
        return self.used > TOO_MUCH * self.cores

    @property
    def text(self) -> str:
        """The clause that a report begins with."""
        return (
            f"the machine is busy: other processes use {self.used:.1f} of {self.cores} cores, so "
            "times are longer, and intervals wider, than on an idle one"
        )


def disturbance(load: OtherLoad | None) -> str:
    """Return the clause about a load that makes times longer; "" if it is small, or not known."""
    return load.text if load is not None and load.is_busy else ""


class LoadSoFar(NamedTuple):
    """Core time in seconds since the machine started."""

    busy_s: float
    own_s: float
    cores: int
    when_s: float

    def others(self) -> OtherLoad | None:
        """Return the load of other processes since then; None if the machine does not report it."""
        now = load_so_far()
        if now is None or now.when_s <= self.when_s:
            return None
        others_s = (now.busy_s - self.busy_s) - (now.own_s - self.own_s)
        return OtherLoad(max(0.0, others_s / (now.when_s - self.when_s)), self.cores)


def load_so_far() -> LoadSoFar | None:
    """Return the core time used so far; None if the machine does not report it."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")
        rows = map(str.split, (_PROC / "stat").read_text().splitlines())
        columns = [[*map(int, row[1:])] for row in rows if row[0] in cores]
        # With several ranks, the parent is the launcher, whose tree includes all ranks on this
        # machine.
        own = _tree_ticks(os.getpid() if is_alone() else os.getppid())
    except (AttributeError, OSError, ValueError):
        return None
    busy = sum(sum(of[:_GUEST]) - of[_IDLE] - of[_IO_WAIT] for of in columns)
    return LoadSoFar(busy / ticks, own / ticks, len(cores), time.monotonic())


def _tree_ticks(root: int) -> int:
    """Return the core time of a process, its descendants, and those of them that have ended."""
    used: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for path in _PROC.glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            of = path.read_text().rpartition(")")[2].split()
            # The name, in parentheses, may contain any character. Columns after it: parent (1), own
            # user and system time (11, 12), and those of children that ended (13, 14).
            used[int(path.parent.name)] = sum(map(int, of[11:15]))
            children[int(of[1])].append(int(path.parent.name))
    total = 0
    ahead = [root]
    while ahead:
        pid = ahead.pop()
        total += used.get(pid, 0)
        ahead += children[pid]
    return total
