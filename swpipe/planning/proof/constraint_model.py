"""Is there a plan with this initiation interval? A model of that question for a solver (CP-SAT).

At a fixed interval all constraints are linear in integers. Task v has a stage s, host work that
begins at y within the period, and device work that begins at z, counted from the start of the same
period::

    0        y_admit       y      y + host                   II
    |-- caller's ... ------[host v]-----------------<retire>-|   threads: no overlap, modulo II
                              `--> z [device v]                  streams: in the order of the y

The period begins right after the caller's ``<retire>``, so that no work of the caller's thread
crosses it. ``<admit>`` comes before all tasks of stage 0, and an iteration's end no more than
``depth`` periods after it; the device is done with it ``run_ahead`` periods later.

What is not linear is left out: whose work comes first where several threads launch to the caller's
stream or use one resource; and how long a thread waits for a task that blocks, beyond the time of
its work. So "no" proves that no plan has this interval, and "yes" comes with a schedule whose
interval the simulator has to confirm.

Source: the formulation with stage and offset goes back to A. E. Eichenberger and E. S. Davidson,
"Efficient formulation for optimal modulo schedulers" (PLDI 1997).
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Any

from swpipe._solver import solve
from swpipe.planning.modulo.modulo_schedule import ModuloSchedule, period_order_of
from swpipe.planning.modulo.schedule_graph import ScheduleGraph

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


class ConstraintModel:
    """The constraints of one loop at one interval.

    Args:
        graph: The loop.
        period: The initiation interval, in units of ``unit_us``.
        threads: Thread groups at most.
        depth: Iterations in flight at most.
        unit_us: Times are rounded down to it: "no" stays proof.
    """

    def __init__(
        self, graph: ScheduleGraph, period: int, threads: int, depth: int, unit_us: float
    ) -> None:
        from ortools.sat.python import cp_model

        self.graph, self.period, self.threads, self.depth = graph, period, threads, depth
        # Without a limit one that shortens no interval: more than threads can be apart.
        self.ahead = depth + 2 if graph.run_ahead is None else graph.run_ahead
        self.unit_us = unit_us
        self.model: Any = cp_model.CpModel()
        n = graph.size
        self.host = [self._units(x) for x in graph.host_us]
        self.launch = [self._units(x) for x in graph.launch_us]
        self.device = [self._units(x) for x in graph.device_us]
        self.handover = self._units(graph.handover_us)
        new = self.model.new_int_var
        self.stage = [new(0, depth - 1, f"s{v}") for v in range(n)]
        self.y = [new(0, period - 1 if period else 0, f"y{v}") for v in range(n)]
        self.z = [new(0, (depth + 1 + self.ahead) * period, f"z{v}") for v in range(n)]
        self.thread = [
            [self.model.new_bool_var(f"l{v}.{k}") for k in range(threads)] for v in range(n)
        ]
        self._threads()
        self._dependences()
        self._frozen()
        self._resources()
        if graph.streams:
            self._streams()
        else:
            self._window()

    def solve(self, seconds: float, workers: int) -> tuple[bool | None, ModuloSchedule | None]:
        """Whether there is a plan (None where time ran out), and the plan."""
        from ortools.sat.python import cp_model

        solver, status = solve(self.model, seconds, workers)
        if status == cp_model.INFEASIBLE:
            return False, None
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, None
        return True, self._schedule(solver)

    def _schedule(self, solver: cp_model.CpSolver) -> ModuloSchedule:
        n = self.graph.size
        stage = tuple(solver.value(s) for s in self.stage)
        start = zip(map(solver.value, self.y), map(solver.value, self.z), range(n), strict=True)
        return ModuloSchedule(
            thread=tuple(
                next(k for k, literal in enumerate(self.thread[v]) if solver.value(literal))
                for v in range(n)
            ),
            stage=stage,
            order=period_order_of(self.graph, stage, dict(enumerate(start))),
        )

    def _units(self, time_us: float) -> int:
        return math.floor(time_us / self.unit_us + 1e-9)

    # ----------------------------------------------------------- constraints

    def _no_overlap(self, work: list[tuple[Any, int, Any]]) -> None:
        """(start within the period, time, literal or None): apart, modulo the period."""
        intervals: list[Any] = []
        for k, (start, time, literal) in enumerate(work):
            for shift in (0, self.period):
                name = f"i{len(intervals)}.{k}"
                intervals.append(
                    self.model.new_fixed_size_interval_var(start + shift, time, name)
                    if literal is None
                    else self.model.new_optional_fixed_size_interval_var(
                        start + shift, time, literal, name
                    )
                )
        self.model.add_no_overlap(intervals)

    def _threads(self) -> None:
        for v, threads in enumerate(self.thread):
            self.model.add_exactly_one(threads)
            self.model.add(self.y[v] + self.host[v] <= self.period).only_enforce_if(threads[0])
        for v in self.graph.frozen:
            self.model.add(self.thread[v][0] == 1)
        for k in range(self.threads):
            self._no_overlap(
                [(self.y[v], self.host[v], self.thread[v][k]) for v in range(self.graph.size)]
            )
        for k in range(1, self.threads - 1):  # threads are alike: the fuller ones first
            used = [self.thread[v][k + 1] for v in range(self.graph.size)]
            any_before = [self.thread[v][k] for v in range(self.graph.size)]
            for literal in used:
                self.model.add_bool_or(any_before).only_enforce_if(literal)

    def _same(self, a: int, b: int) -> Any:
        """A literal: the two are on one thread."""
        same = self.model.new_bool_var(f"same{a}.{b}")
        for k in range(self.threads):
            on_a, on_b = self.thread[a][k], self.thread[b][k]
            self.model.add(on_a == on_b).only_enforce_if(same)
            self.model.add_bool_or([on_a.negated(), on_b.negated()]).only_enforce_if(same.negated())
        return same

    def _dependences(self) -> None:
        for c, p, d in self.graph.deps:
            lag = (self.stage[c] - self.stage[p] + d) * self.period
            self.model.add(self.y[c] + lag >= self.y[p] + self.host[p])
            if self.handover and self.threads > 1 and c != p:
                self.model.add(
                    self.y[c] + lag >= self.y[p] + self.host[p] + self.handover
                ).only_enforce_if(self._same(c, p).negated())
        n = self.graph.size
        for tail, head, _, d in self.graph.edges:
            if min(tail, head) >= n:
                c, p = head - n, tail - n
                lag = (self.stage[c] - self.stage[p] + d) * self.period
                self.model.add(self.z[c] + lag >= self.z[p] + self.device[p])

    def _frozen(self) -> None:
        last = sorted(self.graph.last)
        for v in last:
            self.model.add(self.stage[v] == self.stage[last[0]])
        if last:
            for v in range(self.graph.size):
                self.model.add(self.stage[v] <= self.stage[last[0]])

    def _resources(self) -> None:
        n = self.graph.size
        users: dict[int, list[tuple[Any, int, Any]]] = defaultdict(list)
        within: dict[int, Any] = {}
        for operation, reservations in enumerate(self.graph.reservations):
            for reserved in reservations:
                if operation >= n and operation not in within:
                    within[operation] = self._modulo(self.z[operation - n])
                start = within[operation] if operation >= n else self.y[operation]
                users[reserved.resource].append((start, self._units(reserved.time_us), None))
        for work in users.values():
            self._no_overlap(work)

    def _modulo(self, z: Any) -> Any:
        within = self.model.new_int_var(0, self.period - 1, "")
        turns = self.model.new_int_var(0, self.depth + 1 + self.ahead, "")
        self.model.add(z == within + turns * self.period)
        return within

    def _window(self) -> None:
        """Without streams: from <admit> at 0 to <retire> at depth x period."""
        for v in range(self.graph.size):
            start = self.stage[v] * self.period + self.y[v]
            self.model.add(start + self.host[v] <= self.depth * self.period)
            off = self.thread[v][0].negated()
            self.model.add(start >= self.handover).only_enforce_if(off)
            self.model.add(
                start + self.host[v] + self.handover <= self.depth * self.period
            ).only_enforce_if(off)

    def _streams(self) -> None:
        new, add, period = self.model.new_int_var, self.model.add, self.period
        admit, retire = new(0, period, "admit"), new(0, period, "retire")
        done = new(0, (2 + self.ahead) * period, "done")
        add(done >= retire)
        if self.graph.run_ahead is not None:
            add(admit + (1 + self.ahead) * period >= done + self.handover)
        for v in range(self.graph.size):
            caller, lag = self.thread[v][0], (self.depth - 1 - self.stage[v]) * period
            new_here = self.model.new_bool_var(f"new{v}")
            add(self.stage[v] >= 1).only_enforce_if(new_here.negated())
            add(self.y[v] >= admit).only_enforce_if(new_here)
            add(self.y[v] >= admit + self.handover).only_enforce_if([new_here, caller.negated()])
            before = self.model.new_bool_var(f"before{v}")
            add(self.y[v] + self.host[v] <= admit).only_enforce_if([caller, before])
            add(self.y[v] >= admit).only_enforce_if([caller, before.negated()])
            add(self.y[v] + self.host[v] <= retire).only_enforce_if(caller)
            add(self.y[v] + self.host[v] <= retire + lag)
            add(self.z[v] >= self.y[v] + self.launch[v])
            add(done + lag >= self.z[v] + self.device[v])
            if self.graph.stream[v] == 0:
                add(self.z[v] + self.device[v] <= done).only_enforce_if(caller)
                add(self.z[v] + period >= done).only_enforce_if(caller)
        self._queues()

    def _queues(self) -> None:
        """Device work on one stream, or with one resource, in the order of launch."""
        n, stream = self.graph.size, self.graph.stream
        uses = [{used.resource for used in self.graph.reservations[n + v]} for v in range(n)]
        for a, b in combinations(range(n), 2):
            if not uses[a] & uses[b]:
                continue
            known = stream[a] == stream[b] > 0 or self.threads == 1
            given = [] if known else [self._same(a, b)]
            first = self.model.new_bool_var(f"first{a}.{b}")
            for sooner, later, literal in ((a, b, first), (b, a, first.negated())):
                when = [*given, literal]
                y, z = self.y, self.z
                self.model.add(y[later] >= y[sooner] + self.host[sooner]).only_enforce_if(when)
                self.model.add(z[later] >= z[sooner] + self.device[sooner]).only_enforce_if(when)
                self.model.add(
                    z[sooner] + self.period >= z[later] + self.device[later]
                ).only_enforce_if(when)
