"""Whether a small loop has a plan, by a constraint solver (CP-SAT): what planners are measured by.

Times are integers.
"""

from __future__ import annotations

from typing import Any

from ortools.sat.python import cp_model

from swpipe.planning.modulo.schedule_graph import ScheduleGraph


def _is_possible(model: Any) -> bool:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = 60
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # it would leave SIGINT without a handler
    status = solver.solve(model)
    assert status != cp_model.UNKNOWN, "the time is over"
    return status in (cp_model.OPTIMAL, cp_model.FEASIBLE)


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
    return _is_possible(model)
