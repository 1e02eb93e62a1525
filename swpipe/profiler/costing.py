"""A cost model from a pipeline: what its tasks take on this machine, on these batches.

    serially        host times, CPU times, device times; then again beside a thread that wants the
                    interpreter lock (``swpipe.profiler.lock``)
    pipelined=True  host and device times while the plan runs

Serially each task has the machine to itself. Under a plan, tasks that run side by side share cores,
caches and memory bandwidth, and a worker thread gets its memory from elsewhere than the caller's
(large arrays may take several times as long to make there). No sum of lone tasks tells that: where
it matters, measure under the plan or one like it. The costs then hold for plans that put the same
tasks side by side. Under the plan a task's time includes what it waits for the interpreter lock, so
its ``gil_us`` is 0 then.

Times are means over the runs on a batch, then over batches: the interval between iterations is made
of slow runs too, which a median leaves out. ``gil_us`` is the least of several runs, as
``swpipe.profiler.lock`` tells, and not above the task's CPU time.

A device time is the time between two events around what the task gave to its stream. Where the
host gives it work more slowly than the device does it, that includes the device's idle moments: it
is then about the host time, and more than the device is really busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from swpipe._state.snapshot import Snapshot
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.task import TaskRef, name_of
from swpipe.pipeline import SWPipeline
from swpipe.profiler.host import HostTimes
from swpipe.profiler.lock import LockTimes, Rival
from swpipe.profiler.measure import Bench
from swpipe.profiler.profiler import TaskProfiler
from swpipe.profiler.rounds import Counts

_US = 1e6


def measure_costs(
    pipe: SWPipeline,
    batches: Iterable[Any],
    num_warmup: int = 3,
    num_measure: int = 10,
    pipelined: bool = False,
    *,
    lock: bool = True,
    state: Any = None,
    copy: Callable[[Any], Any] | None = None,
) -> CostModel:
    """Measure what each task of a pipeline costs, and put everything back as it was.

    Args:
        pipe: The pipeline; idle. Under torch.distributed do the same on all ranks.
        batches: At least one; each is fed over and over, and counts alike.
        num_warmup: Iterations on each batch that do not count.
        num_measure: Iterations on each batch that do.
        pipelined: Measure while the plan runs, or else one task at a time.
        lock: Measure ``gil_us`` too; for a serial measurement only. It takes a few times as long as
            the rest. Where False, ``gil_us`` is 0: threads do not hinder each other in Python.
        state: What to put back, as for ``TaskProfiler``; None looks for it.
        copy: Makes a batch that may be modified, for tasks that modify it in place.

    Returns:
        Costs with no resources but threads and streams: ``with_resources`` adds others.

    Raises:
        ValueError: There are no batches, or a number is too small.
        RuntimeError: The pipeline is closed, or iterations are in flight.
        BaseException: Whatever a task raised.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("batches is empty: give at least one batch to measure on")
    Counts(num_warmup, num_measure, num_rounds=2)
    profiler = TaskProfiler(pipe, state=state)
    pipe.check_idle("measuring costs")
    snapshot = Snapshot(profiler.owners(), pipe.device)
    found: list[CostModel] = []
    for batch in batches:
        bench = Bench(pipe, batch, copy, num_warmup, num_measure, pipelined)
        try:
            with pipe.borrow():
                bench.window()  # for nothing: what the first iterations make is there from now on
                found.append(CostModel(_costs(bench, lock=lock and not pipelined)))
        finally:
            snapshot.restore()
    return CostModel.mean(found)


def with_resources(costs: CostModel, resources: Mapping[TaskRef, str | Iterable[str]]) -> CostModel:
    """The same costs, and what only one task at a time can use.

    Args:
        costs: The model.
        resources: Task to what it uses on top of what it has: a communicator, a direction of the
            copy engine, a disk.

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


def _costs(bench: Bench, *, lock: bool) -> dict[str, TaskCost]:
    """On one batch."""
    times = HostTimes(task.name for task in bench.pipe.tasks)
    bench.host_window(times)
    locked_s = _locked_s(bench) if lock else {}
    device_s = _device_s(bench) if bench.pipe.device.has_streams else {}
    cpu_s = times.cpu_s
    return {
        name: TaskCost(
            host_us=_US * mean_s,
            gil_us=_US * min(mean_s, cpu_s[name], locked_s.get(name, 0.0)),
            device_us=_US * device_s.get(name, 0.0),
        )
        for name, mean_s in times.mean_s.items()
    }


def _locked_s(bench: Bench) -> dict[str, float]:
    with Rival() as rival:
        times = LockTimes(rival)
        with bench.pipe.observe(times):
            bench.window()
    return {name: min(runs) for name, runs in times.runs.items()}


def _device_s(bench: Bench) -> dict[str, float]:
    """From the spans on streams of a trace; none where the device's events tell no time."""
    first = bench.pipe.next_iteration + bench.num_warmup
    with bench.pipe.trace() as trace:
        bench.window()
    runs: dict[str, list[int]] = defaultdict(list)
    for span in trace.spans:
        if span.row.kind == "stream" and span.iteration >= first:
            runs[span.task].append(span.duration_ns)
    return {name: fmean(of) / 1e9 for name, of in runs.items()}
