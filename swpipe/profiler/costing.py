"""Cost models: what the tasks of a pipeline cost on this machine, with these batches.

    serial          host, CPU and device times; then, with a thread that competes for the
                    interpreter lock, the time each task holds that lock
    pipelined=True  host and device times while the plan runs
    both            the time of a hand-over between two threads (``swpipe.profiler.thread_costs``),
                    and what is visible only while the device is behind

In a serial measurement each task has the machine to itself. Under a plan, tasks that run at the
same time share cores, caches and memory bandwidth, and memory allocation on a worker thread may be
several times slower for large arrays. Serial times do not show this. If it matters, measure
under the plan or a similar one. The costs then hold for plans that run the same tasks at the same
time. Under the plan, host times include waiting for the interpreter lock, so ``gil_us`` is 0.

Batches are used in the order given. Each time is the mean over them, with a table of the times of
each iteration. A median would ignore slow runs, which are part of the initiation interval.
``gil_us`` is the minimum over the runs, limited to the task's CPU time.

Which tasks wait for the device is visible only while the device is behind::

    thread    read  forward  step  item ...........|    ``.item()`` waits for all that was launched
    device    ...##### forward ######## step ######|    before it on its stream

A task that only launches work takes the same time on its thread whether the device is behind or
not. A task that blocks takes longer when the device is behind, and returns when the device has
nothing left to do. The time between the events before and after a task's work contains no idle time
only if the device begins that work after the task has returned. Therefore serial iterations run
twice: with the device idle before each task, and back to back. If the device is never behind,
neither can be determined, and device times are those of ``WindowTimer.passage``.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean, median
from typing import Any, NamedTuple

from swpipe._engine.observers import Observer
from swpipe._engine.waiting import Host
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import PULL
from swpipe.core.task import TaskRef
from swpipe.device import Device
from swpipe.pipeline import SWPipeline, check_idle
from swpipe.profiler.figures import TaskFigures
from swpipe.profiler.host import HostObserver
from swpipe.profiler.measure import Pulls, WindowTimer
from swpipe.profiler.rounds import Counts
from swpipe.profiler.thread_costs import GilContender, measure_handover_s
from swpipe.profiler.trial import trial
from swpipe.program import Instruction
from swpipe.trace.recorder import timed_event

_US = 1e6

_LOOKS = 50
"""The number of event queries in which an idle device certainly reaches a new event."""

_LEAST_S = 20e-6
"""The smallest difference of host times that counts."""


def measure_costs(
    pipe: SWPipeline[Any],
    batches: Iterable[Any],
    num_warmup: int = 3,
    num_measure: int = 10,
    pipelined: bool = False,
    *,
    lock: bool = True,
    state: Any = None,
    loader: Iterable[Any] | Pulls | None = None,
) -> CostModel:
    """Measure what each task of a pipeline costs, and restore all state afterwards.

    Args:
        pipe: The pipeline, which must be idle. Under torch.distributed, call this on all ranks.
        batches: At least one: the batches of the loop, in order. They are used cyclically.
        num_warmup: Iterations that are not timed.
        num_measure: The fewest iterations that are timed; whole passes over the batches.
        pipelined: Measure while the plan runs, instead of one task at a time.
        lock: Measure ``gil_us`` too, in a serial measurement. This takes a few times as long as
            the rest. If False, ``gil_us`` is 0: the model assumes that Python threads do not
            compete for the interpreter lock.
        state: The state to restore; see ``TaskProfiler``.
        loader: The object that training takes its batches from; see ``TaskProfiler``. The cost of
            its calls is measured too, as ``"<pull>"``. Their ``gil_us`` is the thread's CPU time,
            for a part of which Python may have released the lock.

    Returns:
        Costs in microseconds, without resources; ``with_resources`` adds them. ``handover_us`` is
        the time from a thread's signal to the start of the thread that waits for it, measured
        between two threads while nothing else runs.

    Raises:
        ValueError: There are no batches, or a number is too small.
        RuntimeError: The pipeline is closed, or iterations are in flight.
        BaseException: Any exception of a task.
    """
    batches = list(batches)
    pulls = Pulls.of(loader)
    if not batches:
        raise ValueError("batches is empty: give at least one batch to measure on")
    # This only validates the numbers.
    Counts(num_warmup, num_measure)
    check_idle(pipe, "measuring costs")
    timer = WindowTimer(pipe, batches, None, num_warmup, num_measure, pipelined, pulls)
    with trial(pipe, batches[0], state):
        timer.window()  # not used: the first iterations allocate and compile
        pulls.measure()
        costs = _costs(timer, lock=lock and not pipelined)
    return CostModel(costs, handover_us=_US * measure_handover_s(Host()))


def with_resources(costs: CostModel, resources: Mapping[TaskRef, str | Iterable[str]]) -> CostModel:
    """Add resources, each of which only one task at a time can use.

    Raises:
        PlanError: A task has no cost.
    """
    tasks = dict(costs.tasks)
    for task, used in resources.items():
        ((name, cost),) = costs.of([task]).items()
        added = (used,) if isinstance(used, str) else tuple(used)
        both = tuple(dict.fromkeys((*cost.resources, *added)))
        tasks[name] = replace(cost, resources=both)
    return replace(costs, tasks=tasks)


def _costs(timer: WindowTimer, *, lock: bool) -> dict[str, TaskCost]:
    loop = timer.passage(timer.whole_cycles(timer.measure))
    # The loader is called outside of the tasks, where its lock time is not seen; ``inf`` leaves its
    # CPU time as the limit.
    gil_s = {**_gil_s(timer), PULL: math.inf} if lock else {}
    blocking_s, exact_s = _while_behind(timer)
    works_s = loop.of_batch(None)
    costs = {}
    for name, thread in loop.tasks.items():
        cost = TaskFigures(thread, works_s.get(name, ())).cost(len(loop.steps_s))
        # The tables hold the times that these two corrections replace, so they are left out. Exact
        # device times contain no idle time.
        if name in exact_s:
            cost = replace(cost, device_us=_US * exact_s[name], device_each_us=())
        # The host time of a task that blocks includes the device time of its own work, which the
        # model counts separately.
        if name in blocking_s:
            host_us = max(0.0, _US * blocking_s[name] - cost.device_us)
            cost = replace(cost, host_us=host_us, blocks=True, host_each_us=())
        gil_us = _US * min(thread.cpu_s, gil_s.get(name, 0.0))
        costs[name] = replace(cost, gil_us=min(cost.host_us, gil_us))
    return costs


def _gil_s(timer: WindowTimer) -> dict[str, float]:
    with GilContender() as contender:
        # The CPU time of a run is the contender's: whenever it has none, the task holds the lock.
        observer = HostObserver(timer.pipe.tasks, contender.times)
        with timer.pipe.observe(observer):
            timer.window()
    # The minimum: whatever takes time from the contender makes a run look too long, never too
    # short.
    return {
        name: max(0.0, min(run.wall_s - run.cpu_s for run in runs))
        for name, runs in observer.runs.items()
    }


# ------------------------------------------------------------------------- a device that is behind


def _while_behind(timer: WindowTimer) -> tuple[dict[str, float], dict[str, float]]:
    """Return what is visible only while the device is behind, in seconds.

    Returns:
        Each task that blocks, with its time on its thread if the device is idle before it; and
        task to the time of its work on the device, if known without idle time.
    """
    blocking_s: dict[str, float] = {}
    device_s: dict[str, float] = {}
    if timed_event(timer.pipe.device) is None:
        return blocking_s, device_s
    alone = _watch(timer, idle=True)
    behind = _watch(timer, idle=False)
    for name, works in alone.items():
        # The warm-up allocates and compiles, which would make a task look as if it blocked.
        took_s = [work.wall_s for work in works[timer.warmup :]]
        late = [work for work in behind[name] if work.begins_late]
        least_s = median(took_s) + _LEAST_S
        # A task blocks only if in every late run it took longer and left no work behind.
        if late and all(work.wall_s > least_s and not work.is_left for work in late):
            blocking_s[name] = fmean(took_s)
        exact = [work for work in late if work.is_all_late]
        if exact:
            device_s[name] = fmean(work.before.elapsed_time(work.after) for work in exact) / 1e3
    return blocking_s, device_s


def _watch(timer: WindowTimer, *, idle: bool) -> dict[str, list[_DeviceWork]]:
    """Watch serial iterations in immediate succession, and return the works of each task."""
    pipe = timer.pipe
    watch = _DeviceWatch(pipe.device, idle=idle)
    first = pipe.next_iteration
    with pipe.observe(watch):
        for number in range(first, first + timer.warmup + timer.measure):
            pipe.run_one_serial_iter(timer.batches[number % timer.cycle], number)
    pipe.device.synchronize()
    return watch.works


class _DeviceWork(NamedTuple):
    """A task's work on its stream: the events around it, and the progress of the stream.

    Attributes:
        wall_s: How long the task occupied its thread.
        before: The event before the work.
        after: The event after the work.
        begins_late: Whether the stream had not reached the work when the task began.
        is_all_late: Whether the stream had not reached the work when the task returned.
        is_left: Whether some of the work was left when the task returned.
    """

    wall_s: float
    before: Any
    after: Any
    begins_late: bool
    is_all_late: bool
    is_left: bool


class _DeviceWatch(Observer):
    """An observer of serial iterations; if ``idle``, the device is idle before each task."""

    def __init__(self, device: Device, *, idle: bool) -> None:
        self.works: dict[str, list[_DeviceWork]] = defaultdict(list)
        self._device = device
        self._idle = idle
        self._begin: tuple[Any, bool, float] = (None, False, 0.0)

    def start(self, ins: Instruction, iteration: int) -> None:
        # Synchronizing before the clock starts keeps the wait out of the task's time.
        if self._idle:
            self._device.synchronize()
        self._begin = (*self._mark(), time.perf_counter())

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        # The clock stops first, so that the queries below are not part of the task's time.
        now_s = time.perf_counter()
        before, late, begin_s = self._begin
        is_all_late = not before.query()
        after, left = self._mark()
        work = _DeviceWork(now_s - begin_s, before, after, late, is_all_late, left)
        self.works[ins.task].append(work)

    def _mark(self) -> tuple[Any, bool]:
        """Return a new event on the stream, and whether there is work before it."""
        event: Any = self._device.new_event(timing=True)
        event.record(self._device.current_stream())
        # Even an idle device needs a moment to reach the event, so it is queried several times.
        return event, not any(event.query() for _ in range(_LOOKS))
