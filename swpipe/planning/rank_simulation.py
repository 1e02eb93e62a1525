r"""The simulation of a plan on many ranks at once, whose times differ.

Each rank has the timed graph of the program (``planning.simulation.timed_graph``), and all of them
are run together, node by node, on arrays with a place for each rank::

    period p       rank 0   rank 1   rank 2
    read i+1         60       61      300      its time x the rank's factor x slow, after its arcs
    dist i+1         65       66      305
      meets         305      305      305      ends when the slowest one has ended
    train i         ...

A task that meets other ranks ends everywhere at the maximum, so that a late rank delays all ranks.
For a small number of ranks, many groups are simulated side by side, so that as many slow iterations
are seen as with many ranks.

Resources without a fixed order in the timed graph (``contended``) are granted in the order of the
program on all ranks; the interpreter lock is not simulated. The difference that this makes to one
rank is added, so that the result equals that of ``simulate`` if the ranks' times do not differ.

**The floor.** Let a task m meet other ranks on a resource that serves one operation at a time. From
the end of m on one iteration to its end on the next, the resource of each rank runs every task that
uses it once, of whatever iteration. So no step is shorter than the mean over iterations of the
maximum over ranks of the sum of these times. Tasks that dependences put between the two ends belong
to the iteration before or after. The remaining tasks may all be of different iterations, which
evens out their times most.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from swpipe.core.costs import CostModel
from swpipe.core.dependence import topological
from swpipe.core.plan import PULL
from swpipe.planning.modulo.bounds import bounds_of
from swpipe.planning.modulo.schedule_graph import (
    LOCK,
    ScheduleGraph,
    least_stages,
    schedule_graph,
)
from swpipe.planning.ranks import Ranks, RankStep
from swpipe.planning.simulation.cycles import TICKS_PER_US
from swpipe.planning.simulation.interval import interval_of
from swpipe.planning.simulation.timed_graph import TimedGraph, rings, timed_graph
from swpipe.program import ADMIT, Program

_Times: TypeAlias = NDArray[np.float64]

_WARM_UP = 80
_MEASURED = 240
"""The number of iterations before the measured ones, and of measured ones.

240 is a multiple of 1 to 6, 8 and 10: repeating patterns of these lengths are measured as a whole.
"""

_PLACES = 8_192
"""The least number of places for which times are drawn, so that chance hardly moves the mean."""

_SAMPLES = 2**17
"""The number of times drawn for the floor."""

_SEED = 20_251


def step_us(program: Program, costs: CostModel, ranks: Ranks) -> float:
    """Return the step on many ranks in microseconds, without its parts. Searches use it."""
    meeting = ranks.meeting(program.resolved.plan, costs)
    graph = timed_graph(program, costs, sampled=True)
    many_us = _mean_step_us(graph, ranks, meeting)
    return interval_of(graph).ii_us + (many_us - _mean_step_us(graph, Ranks(1), meeting))


def rank_step(program: Program, costs: CostModel, ranks: Ranks) -> RankStep:
    """Return the step on many ranks, its parts and its floor.

    Raises:
        PlanError: As for ``Ranks.meeting``, or a task has no cost.
    """
    meeting = ranks.meeting(program.resolved.plan, costs)
    graph = timed_graph(program, costs, sampled=True)
    work_us = interval_of(graph).ii_us
    # Three simulations separate the parts: equal times; times that differ without meetings (waiting
    # for the rank's own input); times that differ with meetings (waiting for the slowest rank as
    # well).
    certain = _mean_step_us(graph, Ranks(1), meeting)
    alone = _mean_step_us(graph, ranks, ())
    together = _mean_step_us(graph, ranks, meeting)
    loop = schedule_graph(program.resolved, costs, streams=program.streams)
    return RankStep(
        ranks=ranks,
        step_us=work_us + (together - certain),
        work_us=work_us,
        input_us=alone - certain,
        slowest_us=together - alone,
        floor_us=_floor_us(loop, ranks, meeting),
    )


def _mean_step_us(graph: TimedGraph, ranks: Ranks, meeting: Collection[str]) -> float:
    """Return the mean step of ranks that meet in some tasks."""
    graph = graph.limited()
    nodes = graph.nodes
    into = _arcs_into(graph)
    order = _order(into)
    meets = _meeting_nodes(graph, meeting)
    far = 1 + max(lag for arcs in into for _, _, lag in arcs)
    # The last axis is the ranks of a group; the first is groups side by side.
    differ = ranks.jitter or ranks.slow
    shape = (max(1, _PLACES // ranks.number), ranks.number) if differ else (1, 1)
    # A ring over periods, as long as the largest lag, so that memory does not grow with the run.
    ends = np.zeros((len(nodes), far, *shape))
    factors: dict[int, Mapping[str, _Times]] = {}
    last = _WARM_UP + _MEASURED
    retire = nodes[graph.retire]
    retired: list[float] = []
    for period in range(last + retire.stage + 1):
        for k in order:
            node = nodes[k]
            end = ends[k, period % far]
            end[...] = 0.0
            for tail, extra_us, lag in into[k]:
                if period >= lag:
                    np.maximum(end, ends[tail, (period - lag) % far] + extra_us, out=end)
            iteration = period - node.stage
            # Before the first iteration no task takes time, and no ranks meet.
            if iteration < 0:
                continue
            if iteration not in factors:
                factors[iteration] = _factors(ranks, iteration, shape)
            time = node.each[iteration % len(node.each)] if node.each else node.time
            if time:
                drawn = factors[iteration]
                end += time / TICKS_PER_US * drawn.get(node.task, drawn[""])
            if k in meets:
                end[...] = end.max(axis=1, keepdims=True)
        factors.pop(period - graph.depth, None)
        if period - retire.stage in (_WARM_UP, last):
            retired.append(float(ends[graph.retire, period % far].mean()))
    return (retired[1] - retired[0]) / _MEASURED


def _factors(ranks: Ranks, iteration: int, shape: tuple[int, int]) -> Mapping[str, _Times]:
    """Return the factors on each rank's times: "" for all tasks, and one for each slow task.

    Each iteration has a generator of its own, so that all plans meet the same slow batches.
    """
    rng = np.random.default_rng((_SEED, iteration))
    jitter = _lognormal(rng, ranks.jitter, shape)
    factors = {"": jitter}
    for task, (share, factor) in ranks.slow.items():
        slow = np.where(rng.random(shape) < share, factor, 1.0)
        # Without a group that pulls, the time of a pull is that of ``<admit>``.
        names = (PULL, ADMIT) if task == PULL else (task,)
        factors.update(dict.fromkeys(names, jitter * slow))
    return factors


def _meeting_nodes(graph: TimedGraph, meeting: Collection[str]) -> frozenset[int]:
    """Return the nodes at which ranks meet: on the device, if the task has work there."""
    # A task may have several nodes: host work (these come first), device work and a return, which
    # takes no time. It meets at one of them only.
    meets: dict[str, int] = {}
    for k, node in enumerate(graph.nodes):
        if node.task in meeting and (node.time or node.task not in meets):
            meets[node.task] = k
    return frozenset(meets.values())


def _arcs_into(graph: TimedGraph) -> list[list[tuple[int, float, int]]]:
    """Return the arcs into each node: tail, microseconds beyond the tail's own time, and lag."""
    nodes = graph.nodes
    # Resources without a fixed order are put into the order of the program.
    lines: dict[object, list[int]] = defaultdict(list)
    for k, node in enumerate(nodes):
        for line in (*graph.queues.get(k, ()), *node.resources):
            lines[line].append(k)
    into: list[list[tuple[int, float, int]]] = [[] for _ in nodes]
    for tail, head, time, lag in (*graph.arcs, *rings(nodes, lines.values())):
        into[head].append((tail, (time - nodes[tail].time) / TICKS_PER_US, lag))
    return into


def _order(into: Sequence[Sequence[tuple[int, float, int]]]) -> list[int]:
    """Return the nodes in an order that agrees with the arcs within a period."""
    rank = {str(k): (k,) for k in range(len(into))}
    within = [
        (str(k), str(tail)) for k, arcs in enumerate(into) for tail, _, lag in arcs if not lag
    ]
    return [int(name) for name in topological(rank, within)]


def _lognormal(rng: np.random.Generator, jitter: float, shape: tuple[int, ...]) -> _Times:
    """Draw factors with a mean of 1 and a standard deviation of ``jitter``."""
    # A lognormal variable with parameters mu and sigma has mean exp(mu + sigma^2 / 2), and a
    # variation of sqrt(exp(sigma^2) - 1): mu = -sigma^2 / 2 gives mean 1.
    sigma = math.sqrt(math.log1p(jitter**2))
    return np.asarray(
        np.exp(rng.normal(-(sigma**2) / 2, sigma, shape)) if sigma else np.ones(shape)
    )


# ------------------------------------------------------------------------------------------ floor


def _floor_us(graph: ScheduleGraph, ranks: Ranks, meeting: Collection[str]) -> float:
    """Return a lower bound on the step of every plan; the module's docstring derives it."""
    floor_us = bounds_of(graph, graph.size).ii_us
    if ranks.number == 1 or not (ranks.jitter or ranks.slow):
        return floor_us
    for name in meeting:
        v = graph.names.index(name)
        operation = graph.device(v) if graph.device_us[v] else v
        time_us = graph.device_us[v] or graph.launch_us[v]
        # The lock is held for a part of a task only, and granted in the order of requests: no
        # floor.
        shared = [
            {k % len(graph.names): us for k, us in uses.items()}
            for resource, uses in graph.uses.items()
            if operation in uses and resource != LOCK
        ]
        for tasks in (*shared, {v: time_us}):
            floor_us = max(floor_us, _longest_us(graph, ranks, v, tasks))
    return floor_us


def _longest_us(
    graph: ScheduleGraph, ranks: Ranks, meets: int, tasks: Mapping[int, float]
) -> float:
    """Return the mean of the slowest rank's time for tasks between two meetings of one of them."""
    # The least distances of dependences from the task to each other task, and back.
    to = _distances(graph.deps, meets)
    back = _distances([(p, c, d) for c, p, d in graph.deps], meets)
    rng = np.random.default_rng(_SEED)
    shape = (max(8, _SAMPLES // ranks.number), ranks.number)
    before, after = (_lognormal(rng, ranks.jitter, shape) for _ in range(2))
    total = np.zeros(shape)
    for v, time_us in tasks.items():
        # Dependences tie the task to the iteration of the second meeting, so it has that factor.
        if v == meets or (back.get(v) == 0 and to.get(v, math.inf) <= 1):
            factor = after
        elif to.get(v) == 0 and back.get(v, math.inf) <= 1:
            factor = before
        else:
            # No dependence ties it to either meeting: its iteration, and so its factor, is
            # independent.
            factor = _lognormal(rng, ranks.jitter, shape) if time_us else before
        share, slower = ranks.slow.get(graph.names[v], (0.0, 1.0))
        total += time_us * factor * np.where(rng.random(shape) < share, slower, 1.0)
    return float(total.max(axis=1).mean())


def _distances(deps: Sequence[tuple[int, int, int]], start: int) -> dict[int, int]:
    """Return the least distance along dependences from a task to each task that follows from it."""
    return {task: -stage for task, stage in least_stages(deps, {start: 0}).items()}
