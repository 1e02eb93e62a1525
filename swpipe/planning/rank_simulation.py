r"""Simulates a plan on many ranks at once, whose times differ.

Each rank has the timed graph of the program (``planning.simulation.timed_graph``), and all of them
are run together, node by node, on arrays with a place for each rank::

    period p       rank 0   rank 1   rank 2
    read i+1         60       61      300      its time x the rank's factor x slow, after its arcs
    dist i+1         65       66      305
      meets         305      305      305      ends when the slowest one has ended
    train i         ...

A task that meets ends everywhere at the maximum, so that a rank that comes late delays all. Of a
few ranks many groups are run side by side, to see as many slow iterations as of many ranks.

What has no fixed order in the timed graph (``contended``) is taken in the order of the program on
all ranks; the interpreter lock is not simulated. The difference that this makes to one rank is
added, so that the result is that of ``simulate`` where the ranks' times do not differ.

**The floor.** Let a task m meet on a resource that serves one operation at a time. From the end of
m on one iteration to its end on the next, each rank's resource does every task that uses it once,
of whatever iteration. So no step is shorter than the mean, over iterations, of the maximum, over
ranks, of the sum of their times. Tasks that dependences put between the two ends belong to the
iteration before or after; the others may all be of different iterations, which evens them out most.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swpipe._engine.program import ADMIT, Program
from swpipe.core.costs import CostModel
from swpipe.core.dependence import topological
from swpipe.core.plan import PULL
from swpipe.planning.limits import Limits
from swpipe.planning.modulo.bounds import bounds_of
from swpipe.planning.modulo.schedule_graph import LOCK, ScheduleGraph, schedule_graph
from swpipe.planning.ranks import Ranks, RankStep
from swpipe.planning.simulation.cycles import TICKS_PER_US
from swpipe.planning.simulation.interval import interval_of
from swpipe.planning.simulation.timed_graph import TimedGraph, timed_graph

_Times: TypeAlias = NDArray[np.float64]

_WARM_UP = 80
_MEASURED = 240
"""Iterations before those that are measured; 240 hold every pattern of up to 6, 8 or 10."""

_PLACES = 8_192
"""In how many places at least times are drawn, for a mean that chance does not move."""

_SAMPLES = 2**17
"""Times drawn for the floor."""

_SEED = 20_251


def step_us(program: Program, costs: CostModel, ranks: Ranks) -> float:
    """Return what a step takes on many ranks, without its parts: for searches."""
    meeting = ranks.meeting(program.resolved.plan, costs)
    graph = timed_graph(program, costs, sampled=True)
    run = _Run(graph.limited(), ranks, frozenset(meeting))
    waiting_us = run.step_us(differ=True, meet=True) - run.step_us(differ=False, meet=True)
    return interval_of(graph).ii_us + waiting_us


def rank_step(program: Program, costs: CostModel, ranks: Ranks) -> RankStep:
    """Return what a step takes on many ranks, its parts and its floor.

    Raises:
        PlanError: As for ``Ranks.meeting``, or a task has no cost.
    """
    plan = program.resolved.plan
    meeting = ranks.meeting(plan, costs)
    graph = timed_graph(program, costs, sampled=True)
    work_us = interval_of(graph).ii_us
    run = _Run(graph.limited(), ranks, frozenset(meeting))
    certain = alone = together = run.step_us(differ=False, meet=True)
    if ranks.jitter or ranks.slow:
        alone = run.step_us(differ=True, meet=False)
        together = run.step_us(differ=True, meet=True)
    floor_us = _floor_us(
        schedule_graph(program.resolved, costs, Limits(), streams=program.streams), ranks, meeting
    )
    return RankStep(
        ranks=ranks,
        step_us=work_us + (together - certain),
        work_us=work_us,
        input_us=alone - certain,
        slowest_us=together - alone,
        floor_us=floor_us,
    )


@dataclass(frozen=True)
class _Run:
    graph: TimedGraph
    ranks: Ranks
    meeting: frozenset[str]

    def step_us(self, *, differ: bool, meet: bool) -> float:
        """Return the mean step, of times that differ or not, and of ranks that meet or do not."""
        nodes = self.graph.nodes
        into = self._into
        far = 1 + max(lag for arcs in into for _, _, lag in arcs)
        shape = (max(1, _PLACES // self.ranks.number), self.ranks.number) if differ else (1, 1)
        ends = np.zeros((len(nodes), far, *shape))
        factors: dict[int, Mapping[str, _Times]] = {}
        last = _WARM_UP + _MEASURED
        first = _WARM_UP
        retire = nodes[self.graph.retire]
        retired = dict[int, float]()
        for period in range(last + retire.stage + 1):
            for k in self._order:
                node = nodes[k]
                end = ends[k, period % far]
                end[...] = 0.0
                for tail, extra_us, lag in into[k]:
                    if period >= lag:
                        np.maximum(end, ends[tail, (period - lag) % far] + extra_us, out=end)
                iteration = period - node.stage
                if iteration < 0:  # before the first iteration nothing takes time, and nobody meets
                    continue
                if iteration not in factors:
                    factors[iteration] = self._factors(iteration, shape) if differ else {}
                time = node.each[iteration % len(node.each)] if node.each else node.time
                if time:
                    drawn = factors[iteration]
                    end += time / TICKS_PER_US * drawn.get(node.task, drawn.get("", 1.0))
                if meet and k in self._meets:
                    end[...] = end.max(axis=1, keepdims=True)
            factors.pop(period - self.graph.depth, None)
            if period >= retire.stage:
                retired[period - retire.stage] = float(ends[self.graph.retire, period % far].mean())
        return (retired[last] - retired[first]) / _MEASURED

    def _factors(self, iteration: int, shape: tuple[int, int]) -> Mapping[str, _Times]:
        """Return how many times as long each rank takes: "" for all tasks, or a slow one.

        Each iteration has a generator of its own, so that all plans meet the same slow batches.
        """
        rng = np.random.default_rng((_SEED, iteration))
        ranks = self.ranks
        jitter = _lognormal(rng, ranks.jitter, shape)
        found = {"": jitter}
        for task, (share, factor) in ranks.slow.items():
            slow = np.where(rng.random(shape) < share, factor, 1.0)
            found[self._node_of_pull if task == PULL else task] = jitter * slow
        return found

    @cached_property
    def _node_of_pull(self) -> str:
        return PULL if any(node.task == PULL for node in self.graph.nodes) else ADMIT

    @cached_property
    def _meets(self) -> frozenset[int]:
        """The nodes at which ranks meet: on the device, if the task has work there."""
        graph = self.graph
        devices = {*graph.device_of.values()}
        returns = {*graph.returns.values()}
        hosts = [k for k in range(len(graph.nodes)) if k not in devices | returns]
        found = (
            (k, graph.device_of.get(k, k)) for k in hosts if graph.nodes[k].task in self.meeting
        )
        return frozenset(device if graph.nodes[device].time else host for host, device in found)

    @cached_property
    def _into(self) -> list[list[tuple[int, float, int]]]:
        """Node to its arcs: tail, microseconds beyond the tail's own time, lag."""
        graph = self.graph
        latest: dict[tuple[int, int, int], int] = {}
        for tail, head, time, lag in (*graph.arcs, *self._rings()):
            extra = time - graph.nodes[tail].time
            key = (tail, head, lag)
            latest[key] = max(extra, latest.get(key, extra))
        into: list[list[tuple[int, float, int]]] = [[] for _ in graph.nodes]
        for (tail, head, lag), extra in latest.items():
            into[head].append((tail, extra / TICKS_PER_US, lag))
        return into

    def _rings(self) -> list[tuple[int, int, int, int]]:
        """Return arcs that take what has no fixed order in that of the program."""
        nodes = self.graph.nodes
        lines: dict[object, list[int]] = defaultdict(list)
        for k, node in enumerate(nodes):
            for line in (*self.graph.queues.get(k, ()), *node.resources):
                lines[line].append(k)
        return [
            (a, b, nodes[a].time, lag)
            for line in lines.values()
            for a, b, lag in (*((a, b, 0) for a, b in pairwise(line)), (line[-1], line[0], 1))
        ]

    @cached_property
    def _order(self) -> list[int]:
        """The nodes in an order that the arcs within a period allow."""
        names = {str(k): (k,) for k in range(len(self.graph.nodes))}
        within = [
            (str(head), str(tail))
            for head, arcs in enumerate(self._into)
            for tail, _, lag in arcs
            if not lag
        ]
        return [int(name) for name in topological(names, within)]


def _lognormal(rng: np.random.Generator, jitter: float, shape: tuple[int, ...]) -> _Times:
    """Draw factors with a mean of 1 and a standard deviation of ``jitter``."""
    sigma = math.sqrt(math.log1p(jitter**2))
    return np.asarray(
        np.exp(rng.normal(-(sigma**2) / 2, sigma, shape)) if sigma else np.ones(shape)
    )


# ------------------------------------------------------------------------------------------ floor


def _floor_us(graph: ScheduleGraph, ranks: Ranks, meeting: Sequence[str]) -> float:
    """Return a lower bound on the step of every plan; see the head of the module."""
    floor_us = bounds_of(graph, graph.size).ii_us
    if ranks.number == 1 or not (ranks.jitter or ranks.slow):
        return floor_us
    for name in meeting:
        v = graph.names.index(name)
        operation = graph.size + v if graph.device_us[v] else v
        time_us = graph.device_us[v] or graph.launch_us[v]
        held = [graph.resources[each.resource] for each in graph.reservations[operation]]
        # The lock is held for a part of a task only, and granted to whoever comes first.
        for tasks in (*(graph.users[what] for what in held if what != LOCK), {v: time_us}):
            floor_us = max(floor_us, _longest_us(graph, ranks, v, tasks))
    return floor_us


def _longest_us(
    graph: ScheduleGraph, ranks: Ranks, meets: int, tasks: Mapping[int, float]
) -> float:
    """Return the mean of the slowest rank's time for tasks between two meetings of one of them."""
    to = _distances(graph, meets, ahead=True)
    back = _distances(graph, meets, ahead=False)
    rng = np.random.default_rng(_SEED)
    shape = (max(8, _SAMPLES // ranks.number), ranks.number)
    before, after = (_lognormal(rng, ranks.jitter, shape) for _ in range(2))
    total = np.zeros(shape)
    for v, time_us in tasks.items():
        if v == meets or (back[v] == 0 and to[v] <= 1):
            factor = after  # of the iteration whose meeting ends the time
        elif to[v] == 0 and back[v] <= 1:
            factor = before
        else:
            factor = _lognormal(rng, ranks.jitter, shape) if time_us else before
        share, slower = ranks.slow.get(graph.names[v], (0.0, 1.0))
        total += time_us * factor * np.where(rng.random(shape) < share, slower, 1.0)
    return float(total.max(axis=1).mean())


def _distances(graph: ScheduleGraph, start: int, *, ahead: bool) -> Sequence[float]:
    """Return the least distance of the dependences from a task to each other, or back to it."""
    found: list[Any] = [math.inf] * graph.size
    found[start] = 0
    for _ in range(graph.size):
        for consumer, producer, distance in graph.deps:
            tail, head = (producer, consumer) if ahead else (consumer, producer)
            found[head] = min(found[head], found[tail] + distance)
    return found
