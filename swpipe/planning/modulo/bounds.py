"""Lower bounds on the interval of all plans for the same tasks, with the reason for each bound.

**ResMII**: the tasks that use a resource one at a time use it once per iteration, so no interval is
shorter than the sum of their times. Resources are

- threads: each thread group of the plan; or, if threads can be chosen freely, the busiest thread
  under the best distribution of the work. The pull of a batch, if its cost is known, counts as a
  task of the caller's thread or of ``pull_group``;
- streams, named resources, the interpreter lock;
- submission: tasks on the same named stream, and globally ordered tasks, are submitted one at a
  time, also from different threads.

**RecMII**: the consumer on iteration i comes after the producer on iteration i - d. A cycle of
dependences limits the interval to at least the sum of its tasks' times over the sum of its
distances. The heaviest cycle counts. Only declared dependences are followed, not the order of
tasks on threads and streams. If the iterations in flight are limited, iteration i begins after
iteration i - depth has ended, and after the device has finished iteration i - depth - run_ahead.

The interval of every plan is at least the greater of the two.

Source: B. R. Rau, "Iterative modulo scheduling: an algorithm for software pipelining loops"
(MICRO-27, 1994), section 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace

from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel
from swpipe.core.messages import in_ms
from swpipe.core.plan import DEFAULT_GROUP, PULL, PipelinePlan
from swpipe.planning.modulo.schedule_graph import ScheduleGraph, schedule_graph
from swpipe.planning.simulation.cycles import (
    TICKS_PER_US,
    Arc,
    ArcCycle,
    heaviest_cycle,
    in_words,
    ticks,
)

_EPS_US = 1e-6

_MOST_NODES = 10_000
"""The number of placements of tasks after which the search for the best distribution stops."""

_MOST_TASKS = 24
"""The number of tasks above which an even distribution over threads is assumed."""


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
        """The greater of the two bounds."""
        return max(self.res_mii_us, self.rec_mii_us)

    def gap(self, ii_us: float) -> float:
        """Return the relative distance of an interval from ``ii_us``; 0.01 is 1%."""
        return ii_us / self.ii_us - 1 if self.ii_us else 0.0

    @property
    def limiting(self) -> str:
        """The resource or the cycle that sets ``ii_us``, in words."""
        return self.busiest if self.res_mii_us >= self.rec_mii_us else self.cycle

    def format(self) -> str:
        """Return both bounds, one per line."""
        rec = f"{in_ms(self.rec_mii_us)}, {self.cycle}" if self.cycle else "none"
        return f"ResMII: {in_ms(self.res_mii_us)}, {self.busiest}\nRecMII: {rec}"


def lower_bounds(
    plan: PipelinePlan, costs: CostModel, *, streams: bool = True, threads: int | None = None
) -> Bounds:
    """Return bounds for all plans with the same tasks, streams, global order and dependences.

    They hold for any depth and ``run_ahead``: a plan that admits too few iterations is slower.

    Args:
        plan: The plan; its stages determine the distances of its ``same_period_deps``.
        costs: A cost for each of its tasks.
        streams: Whether the device has streams; if not, all work is done on threads.
        threads: The number of threads, if each task may run on any of them; None for the plan's
            thread groups.

    Raises:
        PlanError: The plan cannot run, or a task has no cost.
        ValueError: ``threads`` is below 1.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}: give 1 or more, since the caller's thread counts")
    graph = schedule_graph(validate(plan), costs, streams=streams)
    if threads is not None:
        return bounds_of(graph, threads)
    load: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, entry), host_us in zip(plan.schedule.items(), graph.host_us, strict=True):
        load[f"thread {entry.thread_group!r}"][name] = host_us / entry.workers
    if graph.pull_us and plan.pull_group is None:
        load[f"thread {DEFAULT_GROUP!r}"][PULL] = graph.pull_us
    threads_us = {f"{what}: {', '.join(us)}": sum(us.values()) for what, us in load.items()}
    return _bounds(graph, threads_us, None)


def bounds_of(
    graph: ScheduleGraph,
    threads: int,
    depth: int | None = None,
    *,
    concurrent: Collection[str] = (),
    workers: int = 1,
) -> Bounds:
    """Return bounds for all plans of a loop with a number of threads and, if given, a depth.

    The thread that pulls batches, if there is one, is not counted.

    Args:
        graph: The tasks and their dependences.
        threads: The most thread groups, including the caller's.
        depth: The most iterations in flight; None for no limit.
        concurrent: The tasks whose group may have several workers.
        workers: The most workers of a group; the caller's thread is alone.
    """
    host_us = dict(zip(graph.names, graph.host_us, strict=False))
    if graph.pull_group is None:
        host_us[PULL] = graph.pull_us
    if threads == 1:
        concurrent = ()
    # Two bounds for threads: a task is not split, and the busiest thread has at least the least
    # load. Tasks that may have workers do not count for these.
    one_us = {name: us for name, us in host_us.items() if name not in concurrent}
    alone = replace(graph, host_us=tuple(one_us.get(n, 0.0) for n in graph.names[: graph.size]))
    count = "the one thread" if threads == 1 else f"{threads} threads"
    tasks = "all tasks of one worker" if concurrent else "all tasks"
    threads_us = {f"{count}: {tasks}": least_load(alone, threads)}
    if one_us:
        longest = max(one_us, key=lambda name: one_us[name])
        threads_us = {f"one thread: {longest} alone": one_us[longest], **threads_us}
    # Workers divide the work of a group. The caller's thread is a group of one.
    for name in concurrent:
        threads_us[f"{workers} workers: {name} alone"] = host_us[name] / workers
    if concurrent:
        words = f"{count} of {workers} workers each, but for the caller's: all tasks"
        threads_us[words] = sum(host_us.values()) / (1 + (threads - 1) * workers)
    return _bounds(graph, threads_us, depth)


def _bounds(graph: ScheduleGraph, threads_us: dict[str, float], depth: int | None) -> Bounds:
    # Round to ticks, as the times in cycles are: the two bounds can then be compared exactly.
    load = {what: ticks(us) for what, us in threads_us.items()}
    if graph.pull_group is not None:
        load[f"thread {graph.pull_group!r}: {PULL}"] = ticks(graph.pull_us)
    for name, uses in graph.uses.items():
        users = (graph.names[operation % len(graph.names)] for operation, us in uses.items() if us)
        load[f"{name}: {', '.join(users)}"] = sum(map(ticks, uses.values()))
    busiest = max(load, key=lambda what: load[what])
    cycle = _heaviest(graph, depth)
    words = "" if cycle is None else _words(graph, cycle)
    rec_mii_us = 0.0 if cycle is None else cycle.ratio_us
    return Bounds(load[busiest] / TICKS_PER_US, rec_mii_us, busiest, words)


def least_load(graph: ScheduleGraph, threads: int) -> float:
    """Return the busiest thread's host work under the best distribution, or a lower bound of it.

    The method is branch and bound: all distributions that might be better than the best so far are
    tried, the longest tasks first, each on the thread with the least work first.
    """
    free = [v for v in range(graph.size) if v not in graph.frozen]
    work = sorted((graph.host_us[v] for v in free), reverse=True)
    load = [0.0] * threads
    load[0] = graph.frozen_us
    if graph.pull_group is None:
        load[0] += graph.pull_us
    total = load[0] + sum(work)
    # No distribution is below the mean load, the load of the frozen tasks, or the longest task.
    even = max(total / threads, load[0], *graph.host_us)
    if graph.size > _MOST_TASKS:
        return even
    least = total + 1.0
    nodes = 0

    def place(k: int) -> None:
        nonlocal least, nodes
        if k == len(work):
            least = max(load)
            return
        # The remaining work must fit below the best result so far.
        if sum(max(0.0, least - us) for us in load) < sum(work[k:]):
            return
        # Threads of equal load are interchangeable: the dictionary keeps one of them.
        for before, thread in sorted({us: thread for thread, us in enumerate(load)}.items()):
            after = before + work[k]
            if nodes > _MOST_NODES or least <= even + _EPS_US or after >= least - _EPS_US:
                return
            nodes += 1
            load[thread] = after
            place(k + 1)
            load[thread] = before

    place(0)
    return even if nodes > _MOST_NODES else least


# ------------------------------------------------------------------------------------- RecMII


def _heaviest(graph: ScheduleGraph, depth: int | None) -> ArcCycle | None:
    """Return the heaviest cycle of dependences and, with a depth, of admission and retirement."""
    count = len(graph.names)
    along = (graph.admit, *graph.serial, graph.retire)
    place = {v: 2 * k for k, v in enumerate(along)}
    back = [] if depth is None else graph.frame_edges(depth)
    edges = [*graph.edges, *back]
    # Bellman-Ford is fast if the arcs are sorted along the serial order.
    edges.sort(key=lambda edge: place[edge.tail % count] + edge.tail // count)
    arcs = [Arc(tail, head, ticks(us), distance) for tail, head, us, distance in edges]
    return heaviest_cycle(2 * count, arcs)


def _words(graph: ScheduleGraph, cycle: ArcCycle) -> str:
    count = len(graph.names)
    # A task may be passed by its host and by its device operation.
    steps = [(graph.names[arc.tail % count], arc.distance) for arc in (*cycle.arcs, cycle.arcs[0])]
    sides = {"host" if arc.tail < count else "device" for arc in cycle.arcs}
    by = f", by {sides.pop()} time" if graph.streams and len(sides) == 1 else ""
    return f"a cycle of dependences{by}: {in_words(steps)}"
