"""How fast any plan for these tasks can be at best, and what forbids more.

**ResMII**: whatever only one task at a time can use is taken once per iteration by each of its
tasks, so no interval is shorter than the sum. That holds for

- a thread: the tasks of each thread group as the plan has them, or, where threads may be chosen
  freely, all tasks over the number of threads, and the longest task;
- a stream, a named resource, the interpreter lock;
- submission: tasks that name the same stream, and globally ordered ones, are submitted one after
  the other, whatever threads they are on.

**RecMII**: the consumer on iteration i comes after the producer on iteration i - d. A cycle of
such dependences takes at least its tasks' times, and lets the iterations follow each other no
faster than that over the sum of its distances. The heaviest cycle counts. Only what the plan
declares is followed, not its order of tasks on threads and streams. On a device with streams a
thread need not wait until the device is done, so that host times and device times make up cycles
of their own.

The interval of every plan is at least the greater of the two; whether a plan reaches it is for a
planner to find out. Nothing is said of depth: a plan that admits too few iterations is slower.

Source: B. R. Rau, "Iterative modulo scheduling: an algorithm for software pipelining loops"
(MICRO-27, 1994), section 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.dependence import Dependence
from swpipe.core.drawing import stream_name
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import ResolvedPlan
from swpipe.planning.simulation.cycles import TICKS_PER_US, Arc, Cycle, heaviest_cycle, ticks
from swpipe.planning.simulation.timed_graph import LOCK, host_time


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on the initiation interval; microseconds.

    Attributes:
        res_mii_us: What the busiest resource takes per iteration.
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
        """Both bounds, a line each."""
        rec = f"{self.rec_mii_us / 1e3:.3f} ms, {self.cycle}" if self.cycle else "none"
        return f"ResMII: {self.res_mii_us / 1e3:.3f} ms, {self.busiest}\nRecMII: {rec}"


def lower_bounds(
    plan: PipelinePlan, costs: CostModel, *, streams: bool = True, threads: int | None = None
) -> Bounds:
    """Bounds for all plans with the same tasks, streams, global order and dependences.

    Args:
        plan: Its ``same_period_deps`` count with the distances that its stages give them.
        costs: A cost for each of its tasks.
        streams: Whether the device has streams; where not, all work is done on threads.
        threads: None for the plan's own thread groups; a number where each task may go to any of
            so many threads.

    Raises:
        PlanError: The plan cannot run, or a task has no cost.
        ValueError: ``threads`` is below 1.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}: there is at least the caller's")
    resolved = validate(plan)
    known = costs.of(plan.schedule)
    taken = _taken(plan, known, streams, threads)
    busiest = max(taken, key=lambda what: taken[what])
    cycle, words = _heaviest(resolved, known, streams)
    return Bounds(
        res_mii_us=taken[busiest] / TICKS_PER_US,
        rec_mii_us=cycle.ratio_us if cycle is not None else 0.0,
        busiest=busiest,
        cycle=words,
    )


# ------------------------------------------------------------------------------------- ResMII


def _taken(
    plan: PipelinePlan, costs: Mapping[str, TaskCost], streams: bool, threads: int | None
) -> dict[str, float]:
    """What can be taken, in words, to the ticks per iteration in which it is."""
    taken: dict[str, float] = {}
    users: dict[str, list[str]] = defaultdict(list)
    for name, what, time in _uses(plan, costs, streams, threads):
        users[what].append(name)
        taken[what] = taken.get(what, 0) + time
    if threads is not None:
        host = {name: host_time(cost, streams) for name, cost in costs.items()}
        taken[_threads_words(threads)] = sum(host.values()) / threads
        longest = max(host, key=lambda name: host[name])
        taken[f"one thread: {longest} alone"] = host[longest]
    return {
        f"{what}: {', '.join(users[what])}" if what in users else what: time
        for what, time in taken.items()
    }


def _threads_words(threads: int) -> str:
    return "the one thread: all tasks" if threads == 1 else f"{threads} threads: all tasks"


def _uses(
    plan: PipelinePlan, costs: Mapping[str, TaskCost], streams: bool, threads: int | None
) -> Iterable[tuple[str, str, int]]:
    """Task, what it takes, and for how many ticks."""
    for name, entry in plan.schedule.items():
        cost = costs[name]
        host = host_time(cost, streams)
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
) -> tuple[Cycle | None, str]:
    plan, deps = resolved.plan, resolved.dependences
    host = {name: host_time(cost, streams) for name, cost in costs.items()}
    best, words = _cycle_of(plan, deps, host), ""
    if best is not None:
        words = _words(plan, best, "host" if streams else "")
    if streams:
        device = {name: ticks(cost.device_us) for name, cost in costs.items()}
        other = _cycle_of(plan, deps, device)
        if other is not None and (best is None or other.ratio_us > best.ratio_us):
            return other, _words(plan, other, "device")
    return best, words


def _cycle_of(
    plan: PipelinePlan, deps: Iterable[Dependence], times: Mapping[str, int]
) -> Cycle | None:
    index = {name: k for k, name in enumerate(plan.schedule)}
    arcs = [Arc(index[d.producer], index[d.consumer], times[d.producer], d.distance) for d in deps]
    return heaviest_cycle(len(index), arcs)


def _words(plan: PipelinePlan, cycle: Cycle, of: str) -> str:
    names = list(plan.schedule)
    words, iteration = [], 0
    for arc in cycle.arcs:
        words.append(f"{names[arc.tail]} i{iteration:+d}" if iteration else f"{names[arc.tail]} i")
        iteration += arc.distance
    words.append(f"{names[cycle.arcs[0].tail]} i{iteration:+d}")
    by = f", by {of} time" if of else ""
    return f"a cycle of dependences{by}: {' -> '.join(words)}"
