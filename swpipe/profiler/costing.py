"""Cost models: what the tasks of a pipeline take on this machine, on these batches.

    serial          host, CPU and device times; then, beside a thread that competes for the
                    interpreter lock, the time each task holds that lock
    pipelined=True  host and device times while the plan runs
    both            the time of a hand-over between two threads (``swpipe.profiler.thread_costs``),
                    and what shows while the device is behind (``swpipe.profiler.device_behind``)

In a serial measurement each task has the machine to itself. Under a plan, tasks that run at the
same time share cores, caches and memory bandwidth, and memory allocation on a worker thread may be
several times slower for large arrays. Serial times do not show this: where it matters, measure
under the plan or a similar one. The costs then hold for plans that run the same tasks at the same
time. Under the plan, host times include waiting for the interpreter lock, so ``gil_us`` is 0.

Times are means over the runs on a batch, then over batches: slow runs are part of the initiation
interval, and a median would ignore them. ``gil_us`` is the minimum of several runs, capped at the
task's CPU time.

A device time is measured while the device is behind the host, if it ever is. If not, it includes
idle time of the device: see ``WindowTimer.device_times_s``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from swpipe._engine.waiting import Host
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import PULL
from swpipe.core.task import TaskRef, name_of
from swpipe.pipeline import SWPipeline
from swpipe.profiler.device_behind import device_behind
from swpipe.profiler.host import HostTimes
from swpipe.profiler.measure import Pulls, WindowTimer
from swpipe.profiler.rounds import Counts
from swpipe.profiler.thread_costs import GilContender, GilTimes, measure_handover_s
from swpipe.profiler.trial_state import trial_state

_US = 1e6


def measure_costs(
    pipe: SWPipeline[Any],
    batches: Iterable[Any],
    num_warmup: int = 3,
    num_measure: int = 10,
    pipelined: bool = False,
    *,
    lock: bool = True,
    state: Any = None,
    copy: Callable[[Any], Any] | None = None,
    loader: Iterable[Any] | None = None,
) -> CostModel:
    """Measure what each task of a pipeline costs, and restore all state afterwards.

    Args:
        pipe: The pipeline; idle. Under torch.distributed, call this on all ranks.
        batches: At least one. Each is fed repeatedly, and all have the same weight.
        num_warmup: Iterations on each batch that are not timed.
        num_measure: Iterations on each batch that are timed.
        pipelined: Measure while the plan runs, instead of one task at a time.
        lock: Measure ``gil_us`` too, in a serial measurement. This takes a few times as long as
            the rest. If False, ``gil_us`` is 0: the model assumes that Python threads do not
            compete for the interpreter lock.
        state: What to restore, as for ``TaskProfiler``.
        copy: Makes a batch that may be modified, for tasks that modify it in place.
        loader: What training takes its batches from, as for ``TaskProfiler``: measure the cost of
            its calls, ``"<pull>"``, too. Their ``gil_us`` is the thread's CPU time, for a part of
            which Python may have released the lock.

    Returns:
        Costs in microseconds, without resources; ``with_resources`` adds them. ``handover_us`` is
        the time from a thread's signal to the start of the thread that waits for it, measured
        between two threads while nothing else runs.

    Raises:
        ValueError: There are no batches, or a number is too small.
        RuntimeError: The pipeline is closed, or iterations are in flight.
        BaseException: Whatever a task raised.
    """
    batches = list(batches)
    pulls = None if loader is None else Pulls(loader)
    if not batches:
        raise ValueError("batches is empty: give at least one batch to measure on")
    Counts(num_warmup, num_measure)
    pipe.check_idle("measuring costs")
    saved = trial_state(pipe, batches[0], state, copy)
    found: list[CostModel] = []
    for batch in batches:
        timer = WindowTimer(pipe, batch, copy, num_warmup, num_measure, pipelined, pulls)
        with saved.trial(), pipe.borrow():
            timer.window()  # not used: the first iterations allocate and compile
            if pulls is not None:
                pulls.begin()
            found.append(CostModel(_costs(timer, lock=lock and not pipelined)))
    return replace(CostModel.mean(found), handover_us=_US * measure_handover_s(Host()))


def with_resources(costs: CostModel, resources: Mapping[TaskRef, str | Iterable[str]]) -> CostModel:
    """Add resources, each of which only one task at a time can use.

    Raises:
        PlanError: A task has no cost.
    """
    tasks = dict(costs.tasks)
    for task, used in resources.items():
        cost = costs.of([name_of(task)])[name_of(task)]
        added = (used,) if isinstance(used, str) else tuple(used)
        both = tuple(dict.fromkeys((*cost.resources, *added)))
        tasks[name_of(task)] = replace(cost, resources=both)
    return CostModel(tasks, costs.handover_us)


def _costs(timer: WindowTimer, *, lock: bool) -> dict[str, TaskCost]:
    times = HostTimes(task.name for task in timer.pipe.tasks)
    timer.window(times)
    if timer.pulls is not None:
        times.put_first(PULL, timer.pulls.runs)
    gil_s = {**_gil_s(timer), PULL: math.inf} if lock else {}  # at most its CPU time
    blocking_s, exact_s = device_behind(timer)
    device_s = timer.device_times_s() | exact_s
    host_s, cpu_s = times.host_s, times.cpu_s
    for name, mean_s in blocking_s.items():  # without the wait
        host_s[name] = max(0.0, mean_s - device_s.get(name, 0.0))
    return {
        name: TaskCost(
            host_us=_US * mean_s,
            gil_us=_US * min(mean_s, cpu_s[name], gil_s.get(name, 0.0)),
            device_us=_US * device_s.get(name, 0.0),
            blocks=name in blocking_s,
        )
        for name, mean_s in host_s.items()
    }


def _gil_s(timer: WindowTimer) -> dict[str, float]:
    with GilContender() as contender:
        times = GilTimes(contender)
        with timer.pipe.observe(times):
            timer.window()
    return {name: min(runs) for name, runs in times.runs.items()}
