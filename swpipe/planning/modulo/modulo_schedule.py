"""A modulo schedule: each task's thread, stage and place in the period, and the plan made of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from swpipe.core.dependence import topological
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan
from swpipe.planning.modulo.schedule_graph import ScheduleGraph


@dataclass(frozen=True, slots=True)
class ModuloSchedule:
    """A thread, a stage and a place for each task, which is given by its number.

    Attributes:
        thread: The thread of each task; 0 is the caller's.
        stage: The stage of each task.
        order: The tasks in the order of a period: a topological order of the dependences of lag 0.
    """

    thread: tuple[int, ...]
    stage: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def threads(self) -> int:
        """The number of thread groups that the schedule takes, including the caller's."""
        return len({0, *self.thread})


def period_order_of(graph: ScheduleGraph, stages: Sequence[int]) -> tuple[int, ...]:
    """Return the tasks in the order of a period: a task of each stage in turn.

    Within a stage tasks are in serial order as far as dependences allow.

    Raises:
        CycleError: The dependences within a period form a cycle.
    """
    # Only dependences of lag 0 order two tasks within a period.
    edges = [(str(c), str(p)) for c, p, d in graph.deps if stages[c] - stages[p] + d == 0]
    places: dict[int, Iterator[int]] = defaultdict(count)
    rank = {str(v): (next(places[stages[v]]), stages[v]) for v in graph.serial}
    return tuple(map(int, topological(rank, edges)))


def plan_of(
    base: PipelinePlan, graph: ScheduleGraph, schedule: ModuloSchedule, depth: int
) -> PipelinePlan | None:
    """Return the plan of a schedule; None if it cannot express ``base``'s ``same_period_deps``.

    Everything that the schedule does not choose is taken from ``base``. The first stage becomes 0.
    """
    first = min(schedule.stage)
    groups = _group_names(base, schedule.thread)
    entries = {
        name: replace(entry, stage=stage - first, thread_group=groups[thread])
        for (name, entry), stage, thread in zip(
            base.schedule.items(), schedule.stage, schedule.thread, strict=True
        )
    }
    within = list(base.deps)
    across = list(base.cross_iter_deps)
    same = []
    # The distance of such a pair follows from the stages of ``base``. If the new stages change it,
    # the pair is written as a dependence with this distance. A negative one cannot be written so.
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
        # A group that pulls has one more iteration in flight, which the schedule does not count.
        pipeline_depth=depth + (base.pull_group is not None),
    )


def _group_names(base: PipelinePlan, threads: Sequence[int]) -> Mapping[int, str]:
    """Return the name of each thread's group: a name that its tasks had, if that is free."""
    names = {0: DEFAULT_GROUP}
    # Keeping the user's names makes the plan easier to compare with the one given.
    for thread in sorted(set(threads) - {0}):
        had = [e.thread_group for v, e in enumerate(base.schedule.values()) if threads[v] == thread]
        numbered = (f"worker {k}" for k in range(1, len(names) + 2))
        taken = {*names.values(), base.pull_group}
        names[thread] = next(name for name in (*had, *numbered) if name not in taken)
    return names
