"""A modulo schedule: each task's thread, stage and place in the period; and its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swpipe.core.dependence import topological
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan
from swpipe.planning.modulo.schedule_graph import ScheduleGraph


@dataclass(frozen=True, slots=True)
class ModuloSchedule:
    """What the planner chooses, in numbers of tasks.

    Attributes:
        thread: Task to its thread; 0 is the caller's.
        stage: Task to its stage.
        order: The tasks in the order of a period: a topological order of the dependences of lag 0.
    """

    thread: tuple[int, ...]
    stage: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def threads(self) -> int:
        """How many thread groups it takes, the caller's counted."""
        return len({0, *self.thread})

    @property
    def parts(self) -> int:
        """How many parts the tasks fall into that share a stage and a thread."""
        return len(set(zip(self.thread, self.stage, strict=True)))

    def from_stage_0(self) -> ModuloSchedule:
        """The same schedule with its first stage at 0."""
        first = min(self.stage)
        return replace(self, stage=tuple(stage - first for stage in self.stage))


def serial_schedule(graph: ScheduleGraph) -> ModuloSchedule:
    """All tasks on the caller's thread, in as few stages as there can be."""
    stages = graph.least_stages
    rank = {v: (-stages[v], place) for place, v in enumerate(graph.serial)}
    return ModuloSchedule((0,) * graph.size, stages, period_order_of(graph, stages, rank))


def period_order_of(
    graph: ScheduleGraph, stages: Sequence[int], rank: Mapping[int, tuple[int, ...]]
) -> tuple[int, ...]:
    """The tasks in the order of a period: the least rank first, where dependences allow it.

    Raises:
        CycleError: The dependences within a period form a cycle.
    """
    edges = [(c, p) for c, p, d in graph.deps if stages[c] - stages[p] + d == 0]
    names = {str(v): rank[v] for v in range(graph.size)}
    return tuple(map(int, topological(names, [(str(c), str(p)) for c, p in edges])))


def plan_of(
    base: PipelinePlan, graph: ScheduleGraph, schedule: ModuloSchedule, depth: int
) -> PipelinePlan | None:
    """The plan of a schedule; None where it cannot state the ``same_period_deps`` of ``base``.

    All that the schedule does not choose is taken from ``base``.
    """
    groups = _group_names(base, schedule.thread)
    entries = {
        name: replace(entry, stage=stage, thread_group=groups[thread])
        for (name, entry), stage, thread in zip(
            base.schedule.items(), schedule.stage, schedule.thread, strict=True
        )
    }
    within = list(base.deps)
    across = list(base.cross_iter_deps)
    same = []
    for c, p in base.same_period_deps:
        distance = base.schedule[p].stage - base.schedule[c].stage
        if entries[p].stage - entries[c].stage == distance:
            same.append((c, p))
        elif distance == 0:
            within.append((c, p))
        elif distance > 0:
            across.append((c, p, distance))
        else:
            return None
    return replace(
        base,
        schedule=entries,
        deps=within,
        cross_iter_deps=across,
        same_period_deps=same,
        order=[graph.names[v] for v in schedule.order],
        pipeline_depth=depth + (base.pull_group is not None),
    )


def _group_names(base: PipelinePlan, threads: Sequence[int]) -> Mapping[int, str]:
    """Thread to the name of its group: one that its tasks had, where that is free."""
    names = {0: DEFAULT_GROUP}
    for thread in sorted(set(threads) - {0}):
        had = [e.thread_group for v, e in enumerate(base.schedule.values()) if threads[v] == thread]
        numbered = (f"worker {k}" for k in range(1, len(names) + 2))
        taken = {*names.values(), base.pull_group}
        names[thread] = next(name for name in (*had, *numbered) if name not in taken)
    return names
