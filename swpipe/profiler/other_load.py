"""How many cores other processes use meanwhile, as Linux tells it.

    all processes    |== own tree ==|== others ==|....... idle .......|
                     of the cores that this process may run on

The own tree is this process and all that it has started, such as a loader's workers. Ranks of one
job on the same machine are started by one parent, and are not others to each other.
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
"""The machine is busy if others use more than this part of the cores, or too busy to tell."""

_PROC = Path("/proc")
# columns of /proc/stat; guest time is in user time, too
_IDLE = 3
_IO_WAIT = 4
_GUEST = 8


@dataclass(frozen=True, slots=True)
class OtherLoad:
    """How many cores other processes used, in the mean, of those that this process has."""

    used: float
    cores: int

    @property
    def is_busy(self) -> bool:
        """Whether times are longer than they would be on an idle machine."""
        return self.used > MUCH * self.cores

    @property
    def is_too_busy(self) -> bool:
        """Whether what is measured says more of the others than of this process."""
        return self.used > TOO_MUCH * self.cores

    @property
    def text(self) -> str:
        """The clause that a report begins with."""
        return (
            f"the machine is busy: other processes use {self.used:.1f} of {self.cores} cores, so "
            "times are longer, and intervals wider, than on an idle one"
        )


class LoadSoFar(NamedTuple):
    """Seconds of core time since the machine started."""

    busy_s: float
    own_s: float
    cores: int
    when_s: float

    def others(self) -> OtherLoad | None:
        """What others have used since then; None where the machine does not tell."""
        now = load_so_far()
        if now is None or now.when_s <= self.when_s:
            return None
        others_s = (now.busy_s - self.busy_s) - (now.own_s - self.own_s)
        return OtherLoad(max(0.0, others_s / (now.when_s - self.when_s)), self.cores)


def load_so_far() -> LoadSoFar | None:
    """The core time used until now; None where the machine does not tell."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")
        rows = map(str.split, (_PROC / "stat").read_text().splitlines())
        columns = [[*map(int, row[1:])] for row in rows if row[0] in cores]
        own = _tree_ticks(os.getpid() if is_alone() else os.getppid())
    except (AttributeError, OSError, ValueError):
        return None
    busy = sum(sum(of[:_GUEST]) - of[_IDLE] - of[_IO_WAIT] for of in columns)
    return LoadSoFar(busy / ticks, own / ticks, len(cores), time.monotonic())


def _tree_ticks(root: int) -> int:
    """The core time of a process, of all that it has started, and of those of them that ended."""
    used: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for path in _PROC.glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            of = path.read_text().rpartition(")")[2].split()  # a name may have any character
            used[int(path.parent.name)] = sum(map(int, of[11:15]))
            children[int(of[1])].append(int(path.parent.name))
    total = 0
    ahead = [root]
    while ahead:
        pid = ahead.pop()
        total += used.get(pid, 0)
        ahead += children[pid]
    return total
