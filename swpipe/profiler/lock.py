"""How long a task needs the interpreter lock, found by a thread that always wants it too.

    task     [== needs it ==]  reads a file, or in a kernel  [= needs it =]
    rival    ....... waits ..[============ holds it =======] ... waits ....

The *rival* does nothing but tell, over and over, how much CPU time it has had, which it only gets
while it holds the lock. Where the two are all that run Python, the lock is with one of them at
every moment: what a task took, less what the rival got meanwhile, is what the task had of it.

Where it ends:

- Each hand-over of the lock takes some 10 us, and counts as the task's. A task of many short
  kernels that each let go of the lock reads too long; no longer than its own CPU time, which is the
  most that is reported.
- The rival needs a core of its own. Where other work takes that, its loss counts as the task's; so
  the least of several runs is taken.
- Python code in other threads than the task's own is the task's.
- The rival slows the task down. What a task takes is measured without it.
"""

from __future__ import annotations

import sys
import threading
import time
from itertools import pairwise
from statistics import median
from typing import Any, Self

from swpipe._engine.observers import Observer
from swpipe._engine.program import Instruction

SWITCH_S = 20e-6
"""How long a thread is let wait for the lock while the rival is about; Python's own is 5 ms."""


_LOOKS = 51  # at the clock, to tell how long one takes

_HELD = 5.0
"""From one look at its clock to the next, the rival goes on for less than so many looks. Where it
took longer, the lock was with others meanwhile, and asking for it took CPU time too."""


class Rival:
    """A thread that always wants the interpreter lock, within a ``with`` block.

    Attributes:
        had_s: Seconds for which it has had the lock so far.
    """

    def __init__(self) -> None:
        self.had_s = 0.0
        self._over = False
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._want, name="swpipe-rival", daemon=True)

    def _want(self) -> None:
        clock = time.thread_time
        looks = [clock() for _ in range(_LOOKS)]
        held_s = _HELD * median(later - sooner for sooner, later in pairwise(looks))
        self._begun.set()
        last_s = clock()
        while not self._over:
            now_s = clock()
            if now_s - last_s < held_s:
                self.had_s += now_s - last_s
            last_s = now_s

    def __enter__(self) -> Self:
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._over = True
        self._thread.join()
        sys.setswitchinterval(self._switch_s)


class LockTimes(Observer):
    """An observer of a serial run: how long each task had the lock beside a rival."""

    def __init__(self, rival: Rival) -> None:
        self._rival = rival
        self._begin = (0.0, 0.0)
        self.runs: dict[str, list[float]] = {}
        """Task to the seconds that it had the lock in each run."""

    def start(self, ins: Instruction, iteration: int) -> None:
        self._begin = (time.perf_counter(), self._rival.had_s)

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        took_s = time.perf_counter() - self._begin[0]
        rivals_s = self._rival.had_s - self._begin[1]
        self.runs.setdefault(ins.task, []).append(max(0.0, took_s - rivals_s))
