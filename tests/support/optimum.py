"""Optima of small jobs, by a constraint solver (CP-SAT): what planners are measured by.

Times and memory are integers.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from ortools.sat.python import cp_model

from swpipe.planning.modulo.schedule_graph import ScheduleGraph
from swpipe.plans.pipeline_parallel.v_order import NEEDS, Objective, VOrders, first_starts


def _solved(model: Any) -> Any:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = 60
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # it would leave SIGINT without a handler
    status = solver.solve(model)
    assert status != cp_model.UNKNOWN, "the time is over"
    return solver if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None


def has_plan(graph: ScheduleGraph, period: int, threads: int, depth: int, unit_us: int) -> bool:
    """Whether a loop without streams has a plan with this interval, in units of ``unit_us``.

    Task v is in stage s, and begins at y within the period, which begins after ``<retire>``: no
    work of the caller's thread crosses that. Source: A. E. Eichenberger and E. S. Davidson,
    "Efficient formulation for optimal modulo schedulers" (PLDI 1997).
    """
    model: Any = cp_model.CpModel()
    tasks = range(graph.size)
    host, over = [int(us) // unit_us for us in graph.host_us], int(graph.handover_us) // unit_us
    s = [model.new_int_var(0, depth - 1, "") for _ in tasks]
    y = [model.new_int_var(0, period - 1, "") for _ in tasks]
    on = [[model.new_bool_var("") for _ in range(threads)] for _ in tasks]

    def apart(work: list[tuple[Any, int, Any]]) -> None:
        """What is done one at a time, modulo the period: (start, time, whether)."""
        model.add_no_overlap(
            model.new_optional_fixed_size_interval_var(start + shift, time, literal, "")
            for start, time, literal in work
            for shift in (0, period)
        )

    for k in range(threads):
        apart([(y[v], host[v], on[v][k]) for v in tasks])
    for number in range(len(graph.resources)):
        apart(
            [
                (y[v], int(used.time_us) // unit_us, 1)
                for v in tasks
                for used in graph.reservations[v]
                if used.resource == number
            ]
        )
    for v in tasks:
        begin, callers = s[v] * period + y[v], on[v][0]
        model.add_exactly_one(on[v])
        model.add(y[v] + host[v] <= period).only_enforce_if(callers)
        model.add(begin + host[v] <= depth * period)
        model.add(begin >= over).only_enforce_if(callers.negated())
        model.add(begin + host[v] + over <= depth * period).only_enforce_if(callers.negated())
    for v in graph.frozen:
        model.add(on[v][0] == 1)
    for v in graph.last:
        for other in tasks:
            model.add(s[v] >= s[other])
    for c, p, d in graph.deps:
        lag = (s[c] - s[p] + d) * period
        model.add(y[c] + lag >= y[p] + host[p])
        for k in range(threads) if c != p else ():
            late = model.add(y[c] + lag >= y[p] + host[p] + over)
            late.only_enforce_if([on[c][k], on[p][k].negated()])
    return _solved(model) is not None


def least_value(orders: VOrders, objective: Objective, most: int) -> float:
    """The least makespan of a V, or the least largest bubble; ``most`` is a value that one has.

    Each pass of each rank has a start; memory is a level that changes at the starts.
    """
    model: Any = cp_model.CpModel()
    heads, m = first_starts(orders)[0], orders.n_micro
    frees = [0] * orders.n_ranks
    if objective == "bubble":
        frees = [int(head + work) for head, work in zip(heads, orders.work, strict=True)]
    value, latest = model.new_int_var(0, most, ""), most + max(frees)
    start = [
        [[model.new_int_var(0, latest, "") for _ in range(m)] for _ in range(6)] for _ in frees
    ]
    for rank, (own, cost, free) in enumerate(zip(start, orders.cost, frees, strict=True)):
        memory = orders.memory[rank]
        model.add_no_overlap(
            model.new_fixed_size_interval_var(one, cost[kind], "")
            for kind in range(6)
            for one in own[kind]
        )
        model.add_reservoir_constraint(
            list(chain(*own)),
            [change for change in memory for _ in range(m)],
            2 * m * sum(min(0, change) for change in memory),
            int(orders.max_mem),
        )
        for kind, need in enumerate(NEEDS):
            model.add(value >= own[kind][-1] + cost[kind] - free)
            source = rank + 1 if kind % 2 else rank - 1
            for micro, one in enumerate(own[kind]):
                if micro:
                    model.add(one >= own[kind][micro - 1] + cost[kind])
                if need is not None:
                    model.add(one >= own[need][micro] + cost[need])
                if kind < 4 and 0 <= source < orders.n_ranks:
                    arrives = orders.cost[source][kind] + orders.hop
                    model.add(one >= start[source][kind][micro] + arrives)
    model.minimize(value)
    return float(_solved(model).objective_value)
