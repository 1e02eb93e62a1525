"""The reasons why tasks that should run side by side did not: shared things not declared.

No cost says what two tasks share. It shows when they run side by side: each takes longer than
alone. Then a plan under which they run side by side is watched::

    task         [==== on the CPU ====|.... off the CPU ....]
                        |                      |-- in futex: waits for a lock
                        |                      |-- elsewhere: a disk, a link, a device
                        `-- longer than alone: memory bandwidth, caches
    contender    [== has the interpreter lock ==|.. waits: some thread holds it all the time ..]

The contender is that of ``swpipe.profiler.thread_costs``. Linux reports in which system call a
thread waits, and how often it gave up its core.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from swpipe.core.messages import listed
from swpipe.pipeline import SWPipeline
from swpipe.profiler.host import ThreadTimes
from swpipe.profiler.measure import WindowTimer
from swpipe.profiler.spread import short_ms
from swpipe.profiler.thread_costs import GilContender

# The number of the system call futex differs between architectures; "" if it is unknown here.
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(os.uname().machine, "")
_TASKS = Path("/proc/self/task")
_EVERY_S = 1e-3
_MUCH = 0.5
_LOCKED = 0.8
"""A cause is named if it explains this fraction of the time. For the interpreter lock the fraction
is higher: the contender shares the cores with other threads and loses some time in any case.
"""

_LEAST = 0.1
"""A task is slowed down by others if the difference is this fraction of its time alone."""


class Contention(NamedTuple):
    """The observations while tasks ran side by side; seconds per iteration.

    Attributes:
        longer_s: Task to how much longer it took than alone.
        cpu_s: CPU time of all threads side by side, and of the tasks alone.
        switches: How often threads gave up their cores.
        in_futex: The fraction of samples of waiting threads that were in ``futex``; None if the
            system does not report it.
        locked: The fraction of the time in which another thread held the interpreter lock.
    """

    longer_s: Mapping[str, float]
    cpu_s: tuple[float, float]
    switches: float
    in_futex: float | None
    locked: float

    @property
    def cause(self) -> str:
        """The usual cause that the figures suggest."""
        beside_s, alone_s = self.cpu_s
        # The order matters: a held interpreter lock also makes threads wait in futex.
        if not self.longer_s:
            return "waits between tasks, which the simulator does not know"
        if self.locked >= _LOCKED:
            return "the interpreter lock, which some task holds while it computes or waits"
        if beside_s - alone_s >= _MUCH * sum(self.longer_s.values()):
            return "memory bandwidth or caches: the same work takes more of the CPU"
        if self.in_futex is None or self.in_futex >= _MUCH:
            return "a lock of the program's own, which both tasks take"
        return "one disk, link or device that both tasks use"

    @property
    def text(self) -> str:
        """The observations, and the usual causes in the order of their frequency."""
        beside_s, alone_s = self.cpu_s
        longer = listed([f"{name} {short_ms(s)} ms" for name, s in self.longer_s.items()])
        futex = "unknown" if self.in_futex is None else f"{self.in_futex:.0%}"
        return (
            f"Side by side tasks take longer than alone ({longer or 'none by much'}), most likely "
            f"for {self.cause}. CPU time of all threads {short_ms(beside_s)} ms, alone "
            f"{short_ms(alone_s)}; {self.switches:.0f} context switches; waiting in futex {futex}; "
            f"interpreter lock taken {self.locked:.0%}. Usual causes, in order: the interpreter "
            "lock, a lock of the program's own, one disk or link, memory bandwidth."
        )


def contention(
    pipe: SWPipeline[Any], batches: Sequence[Any], alone: Mapping[str, ThreadTimes]
) -> Contention:
    """Run a borrowed pipeline under its plan, and observe what its tasks wait for.

    Args:
        pipe: The pipeline, under the plan.
        batches: The batches to run on, each once.
        alone: Task to its times if nothing else runs.
    """
    count = len(batches)
    timer = WindowTimer(pipe, batches, None, 1, count, pipelined=True)
    # Two runs: the contender would change what the samples show, and the tasks' times.
    before = _switches()
    with _waits_in_futex() as seen:
        beside = timer.passage(count).tasks
    switches = _switches() - before
    with GilContender() as contender:
        begin_s = time.perf_counter()
        timer.window()
        took_s = time.perf_counter() - begin_s
    longer_s = {
        name: thread.host_s - alone[name].host_s
        for name, thread in beside.items()
        if name in alone and thread.host_s > (1 + _LEAST) * alone[name].host_s
    }
    beside_s, alone_s = (sum(of.cpu_s for of in tasks.values()) for tasks in (beside, alone))
    return Contention(
        longer_s,
        (beside_s, alone_s),
        switches / count,
        seen[True] / seen.total() if seen else None,
        # Whatever the contender did not get, other threads held.
        1 - min(1.0, contender.held_s / took_s) if took_s else 0.0,
    )


@contextmanager
def _waits_in_futex() -> Iterator[Counter[bool]]:
    """Count, every millisecond of the block, the waiting threads that are in futex, or are not."""
    seen: Counter[bool] = Counter()
    ended = threading.Event()
    thread = threading.Thread(target=_look, args=(seen, ended), name="swpipe-looks", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def _look(seen: Counter[bool], ended: threading.Event) -> None:
    own = str(threading.get_native_id())
    while not ended.wait(_EVERY_S):
        # The directory changes while it is read, since threads start and end at any time.
        for path in _TASKS.glob("*/syscall") if _FUTEX else ():
            # The file begins with the number of the system call, or with "running".
            with suppress(OSError):  # the thread has ended, or the system does not report it
                number = path.read_text().partition(" ")[0]
                # Only waiting threads have a number here; the sampler itself always waits, so it is
                # left out.
                if number.isdecimal() and path.parent.name != own:
                    seen[number == _FUTEX] += 1


def _switches() -> int:
    """Return how often the live threads of this process gave up their cores."""
    count = 0
    for path in _TASKS.glob("*/status"):
        with suppress(OSError, ValueError):
            lines = path.read_text().splitlines()
            # Two lines match: voluntary and involuntary switches.
            count += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return count
