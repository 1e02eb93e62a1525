"""Costs of threads for each other: the time a task holds the interpreter lock, and a hand-over.

A thread that competes for the interpreter lock (GIL) shows how long a task holds it::

    task         [== holds GIL ==]  reads a file, or in a kernel  [= holds GIL =]
    contender    ....... waits ...[======== holds GIL ===========] ... waits ....

The *contender* only adds up its own CPU time, which it gets only while it holds the lock. While
these two are the only threads that run Python, one of them holds the lock at any moment. So the
task held it for its wall time minus the time of the contender.

- Each hand-over of the lock takes about 10 us, which counts as the task's. The result is too high
  for a task of many short kernels that each release the lock; its CPU time is the upper limit.
- The contender needs a core of its own. Time it loses to other work counts as the task's, so the
  minimum of several runs is used.
- Python code in other threads counts as the task's.
- The contender slows the task down, so the task's duration is measured without it.

A hand-over is how long a thread takes to wake up after the counter it waits for has advanced::

    caller   advance(ping, 1) -- wait(pong, 1) ............ | advance(ping, 2) -- wait ...
    worker   ...... wakes up ---- advance(pong, 1) -- wait(ping, 2) ....... wakes up ---
             |<---------- round trip: two hand-overs ---------->|
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any, Self

from swpipe._engine.waiting import Cancelled, Host

SWITCH_S = 20e-6
"""The interpreter's switch interval in seconds while the contender runs; the default is 5 ms."""

# Numbers of hand-overs: those that wake up the cores, and those that are timed.
NUM_WARMUP = 20
NUM_MEASURE = 200

_CALIBRATION_READS = 51

_MAX_READS = 5.0
"""If the time between two clock reads is longer than this many reads, another thread held the lock
in between, and the CPU time went into requesting it.
"""


class GilContender:
    """A thread that competes for the interpreter lock, which it has held for ``held_s`` seconds."""

    def __init__(self) -> None:
        self.held_s = 0.0
        self._stopped = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._compete, name="swpipe-gil", daemon=True)

    def _compete(self) -> None:
        clock = time.thread_time
        # The calibration runs before ``_started`` is set, while the caller waits and nobody
        # competes.
        reads = [clock() for _ in range(_CALIBRATION_READS)]
        limit_s = _MAX_READS * median(later - sooner for sooner, later in pairwise(reads))
        self._started.set()
        last_s = clock()
        while not self._stopped:
            now_s = clock()
            # A longer gap means that the thread waited for the lock; that time is not the
            # contender's.
            if now_s - last_s < limit_s:
                self.held_s += now_s - last_s
            last_s = now_s

    def times(self) -> tuple[float, float]:
        """Return the wall time, and the time for which the contender has held the lock."""
        return time.perf_counter(), self.held_s

    def __enter__(self) -> Self:
        self._switch_s = sys.getswitchinterval()
        # With the default interval, the contender would get the lock too rarely to measure short
        # tasks. The interval belongs to the whole interpreter, so it is restored on exit.
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stopped = True
        self._thread.join()
        sys.setswitchinterval(self._switch_s)


def measure_handover_s(host: Host) -> float:
    """Return the seconds of one hand-over between two threads: the median of some hundred.

    It uses the counters that the thread groups of a pipeline wait for, and takes a few
    milliseconds. No other thread should run.
    """
    ping = host.counter()
    pong = host.counter()
    rounds = range(1, NUM_WARMUP + NUM_MEASURE + 1)

    def answer() -> None:
        with suppress(Cancelled):
            for number in rounds:
                ping.wait(number)
                pong.advance(number)

    worker = host.start("swpipe-handover", answer)
    samples_s = []
    try:
        for number in rounds:
            begin_s = time.perf_counter()
            ping.advance(number)
            pong.wait(number)
            samples_s.append((time.perf_counter() - begin_s) / 2)
    finally:
        # Cancelling the counter wakes up a worker that still waits for it, also after an error
        # here.
        ping.cancel()
        worker.join()
    return median(samples_s[NUM_WARMUP:])
