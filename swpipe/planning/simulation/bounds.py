"""Lower bounds on the interval of all plans for the same tasks, and what sets them.

**ResMII**: the tasks that use a resource one at a time use it once per iteration, so no interval is
shorter than the sum of their times. Resources are

- threads: each thread group of the plan; or, if threads can be chosen freely, the sum over all
  tasks divided by the number of threads, and the longest task. The pull of a batch, where its cost
  is known, counts as a task of the caller's thread or of ``pull_group``;
- streams, named resources, the interpreter lock;
- submission: tasks on the same named stream, and globally ordered tasks, are submitted one at a
  time, also from different threads.

**RecMII**: the consumer on iteration i comes after the producer on iteration i - d. A cycle of
dependences limits the interval to at least the sum of its tasks' times over the sum of its
distances. The heaviest cycle counts. Only declared dependences are followed, not the order of
tasks on threads and streams. On a device with streams, cycles of times on threads and of device
times are separate; a thread has the device time of a task that ``blocks`` too.

The interval of every plan is at least the greater of the two. The bounds ignore depth and
``run_ahead``: a plan that admits too few iterations is slower.

Source: B. R. Rau, "Iterative modulo scheduling: an algorithm for software pipelining loops"
(MICRO-27, 1994), section 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.drawing import stream_name
from swpipe.core.messages import in_ms
from swpipe.core.plan import DEFAULT_GROUP, PULL, PipelinePlan, TaskSchedule
from swpipe.core.resolved import ResolvedPlan
from swpipe.planning.simulation.cycles import TICKS_PER_US, Arc, Cycle, heaviest_cycle, ticks
from swpipe.planning.simulation.timed_graph import LOCK, thread_time


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on the initiation interval; microseconds.

    Attributes:
        res_mii_us: Time per iteration on the busiest resource.
        rec_mii_us: The heaviest cycle of dependences, per iteration of distance; 0 without one.
        busiest: The resource that sets ``res_mii_us``, in words.
        cycle: The cycle that sets ``rec_mii_us``, in words; "" without one.
    """

    res_mii_us: float
    rec_mii_us: float
    busiest: str
    cycle: str

    @property
    def ii_us(self) -> float:
        """The greater of the two."""
        return max(self.res_mii_us, self.rec_mii_us)

    @property
    def limiting(self) -> str:
        """What sets ``ii_us``, in words."""
        return self.busiest if self.res_mii_us >= self.rec_mii_us else self.cycle

    def format(self) -> str:
        """Both bounds, one per line."""
        rec = f"{in_ms(self.rec_mii_us)}, {self.cycle}" if self.cycle else "none"
        return f"ResMII: {in_ms(self.res_mii_us)}, {self.busiest}\nRecMII: {rec}"


def lower_bounds(
    plan: PipelinePlan, costs: CostModel, *, streams: bool = True, threads: int | None = None
) -> Bounds:
    """Bounds for all plans with the same tasks, streams, global order and dependences.

    Args:
        plan: The plan; its stages determine the distances of its ``same_period_deps``.
        costs: A cost for each of its tasks.
        streams: Whether the device has streams; if not, all work is done on threads.
        threads: None for the plan's thread groups; a number if each task may run on any of so many
            threads.

    Raises:
        PlanError: The plan cannot run, or a task has no cost.
        ValueError: ``threads`` is below 1.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}: give 1 or more, since the caller's thread counts")
    resolved = validate(plan)
    known = costs.of(plan.schedule)
    pull = {PULL: costs.tasks[PULL]} if PULL in costs.tasks else {}
    load = _load(plan, known | pull, streams, threads)
    busiest = max(load, key=lambda what: load[what])
    rec_mii_us, cycle = _heaviest(resolved, known, streams)
    return Bounds(load[busiest] / TICKS_PER_US, rec_mii_us, busiest, cycle)


# ------------------------------------------------------------------------------------- ResMII


def _load(
    plan: PipelinePlan, costs: Mapping[str, TaskCost], streams: bool, threads: int | None
) -> dict[str, float]:
    """Resource, in words, to ticks per iteration."""
    uses: dict[str, dict[str, int]] = defaultdict(dict)
    for name, what, time in _uses(plan, costs, streams, threads):
        uses[what][name] = time
    load: dict[str, float] = {
        f"{what}: {', '.join(times)}": sum(times.values()) for what, times in uses.items()
    }
    if threads is not None:
        host = {name: thread_time(cost, streams) for name, cost in costs.items()}
        if plan.pull_group is not None and PULL in host:  # beside the threads
            load[f"thread {plan.pull_group!r}: {PULL}"] = host.pop(PULL)
        count = "the one thread" if threads == 1 else f"{threads} threads"
        load[f"{count}: all tasks"] = sum(host.values()) / threads
        longest = max(host, key=lambda name: host[name])
        load[f"one thread: {longest} alone"] = host[longest]
    return load


def _uses(
    plan: PipelinePlan, costs: Mapping[str, TaskCost], streams: bool, threads: int | None
) -> Iterable[tuple[str, str, int]]:
    """Task, a resource that it uses, and for how many ticks."""
    schedule = dict(plan.schedule)
    if PULL in costs:
        schedule[PULL] = TaskSchedule(thread_group=plan.pull_group or DEFAULT_GROUP)
    for name, entry in schedule.items():
        cost = costs[name]
        host = thread_time(cost, streams)
        on_device = streams and cost.device_us > 0
        if threads is None:
            yield name, f"thread {entry.thread_group!r}", host
        if on_device:
            yield name, f"stream {stream_name(entry.stream)!r}", ticks(cost.device_us)
        if streams and entry.stream is not None:
            yield name, f"submission to stream {stream_name(entry.stream)!r}", host
        if entry.globally_ordered:
            yield name, "submission in global order", host
        for resource in dict.fromkeys(cost.resources):
            yield name, f"resource {resource!r}", ticks(cost.device_us) if on_device else host
        if cost.gil_us:
            yield name, f"the {LOCK}", ticks(cost.gil_us)


# ------------------------------------------------------------------------------------- RecMII


def _heaviest(
    resolved: ResolvedPlan, costs: Mapping[str, TaskCost], streams: bool
) -> tuple[float, str]:
    """Microseconds of the heaviest cycle of dependences, and the cycle in words."""
    names = resolved.serial_order  # so that the search is fast
    index = {name: k for k, name in enumerate(names)}
    times = {"host" if streams else "": {n: thread_time(c, streams) for n, c in costs.items()}}
    if streams:
        times["device"] = {name: ticks(cost.device_us) for name, cost in costs.items()}
    best_us, words = 0.0, ""
    for of, time in times.items():
        arcs = [
            Arc(index[dep.producer], index[dep.consumer], time[dep.producer], dep.distance)
            for dep in sorted(resolved.dependences, key=lambda dep: index[dep.producer])
            if not (dep.host_only and of == "device")
        ]
        cycle = heaviest_cycle(len(names), arcs)
        if cycle is not None and cycle.ratio_us > best_us:
            best_us, words = cycle.ratio_us, _words(names, cycle, of)
    return best_us, words


def _words(names: Sequence[str], cycle: Cycle, of: str) -> str:
    words, iteration = [], 0
    for arc in cycle.arcs:
        words.append(f"{names[arc.tail]} i{iteration:+d}" if iteration else f"{names[arc.tail]} i")
        iteration += arc.distance
    words.append(f"{names[cycle.arcs[0].tail]} i{iteration:+d}")
    by = f", by {of} time" if of else ""
    return f"a cycle of dependences{by}: {' -> '.join(words)}"
