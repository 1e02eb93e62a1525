"""Random work and random plans for it, as plain data.

A *workload* is a serial program: tasks that read, set, rebind and delete attributes of the context,
and that read or change named states which outlive an iteration. A state may have several slots that
are used in rotation, so that iteration i finds what iteration i - slots left. All dependences
follow from these accesses (``dependences_of``). A *plan* declares them, or others that imply them,
and draws the rest: stages without future reads, streams, thread groups, global order, ties and
depth.

Everything is drawn from a ``random.Random``: hypothesis gives one that it can shrink (``cases``),
and loops over seeds have their own (``random_case``).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from itertools import permutations
from typing import Any, NamedTuple, TypeVar

from hypothesis import strategies as st

from swpipe import HOST, PipelinePlan, StreamSpec, TaskSchedule
from swpipe.core.dependence import CycleError
from swpipe.core.plan import DEFAULT_GROUP
from swpipe.core.resolved import resolve_plan

T = TypeVar("T")


class StateUse(NamedTuple):
    """A task's use of a named state."""

    state: str
    writes: bool


@dataclass(frozen=True)
class TaskSpec:
    """A task of a workload.

    Attributes:
        name: Its name.
        reads: Attributes that it reads.
        sets: Attributes that it then sets or rebinds.
        deletes: Attributes that it deletes in the end.
        states: The states that it reads, and changes before it sets anything.
        draws: Whether it draws random numbers, if the machine has them.
        passes: (attribute, another one that it then sets to the same value).
        saves: An attribute whose value it leaves outside of the context, as autograd does.
        takes: The task that has left such a value, which it uses and drops.
        known: Whether it declares the attributes that it uses.
        on_host: Whether it uses plain numbers only, and passes values on without reading them.
        carries: (state, attribute, another one): it leaves the attribute's value in the state, and
            sets the other one to the value that it finds there.
    """

    name: str
    reads: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    states: tuple[StateUse, ...] = ()
    draws: bool = False
    passes: tuple[tuple[str, str], ...] = ()
    saves: str | None = None
    takes: str | None = None
    known: bool = False
    on_host: bool = False
    carries: tuple[str, str, str] | None = None

    def touches(self) -> dict[str, bool]:
        """Return, for each attribute of the task, whether the task changes it."""
        passes = (*self.passes, *([self.carries[1:]] if self.carries else []))
        changed = (*self.sets, *self.deletes, *(new for _, new in passes))  # in order
        used = (*self.reads, *(old for old, _ in passes), *changed)
        return {name: name in changed for name in used}


@dataclass(frozen=True)
class Workload:
    """A serial program.

    Attributes:
        tasks: In serial order.
        slots: State to the number of its slots.
        host_slots: The same of those that tasks of the host alone have.
    """

    tasks: tuple[TaskSpec, ...]
    slots: dict[str, int]
    host_slots: dict[str, int] = field(default_factory=dict)


class Edge(NamedTuple):
    """The consumer on iteration i comes after the producer on iteration i - distance."""

    consumer: str
    producer: str
    distance: int


@dataclass(frozen=True)
class Case:
    """The input of one test.

    Attributes:
        workload: The computation.
        plan: The plan.
        batches: The batches of the iterator, with None among them.
        drains: The iterations after which the pipeline is drained and gets another iterator.
        seed: The seed for all other draws.
    """

    workload: Workload
    plan: PipelinePlan
    batches: tuple[int | None, ...]
    drains: frozenset[int]
    seed: int


# ---------------------------------------------------------------------------------- workloads


def random_workload(rng: random.Random, most_tasks: int = 7) -> Workload:
    """Return a program of one to ``most_tasks`` tasks."""
    slots = {f"state{n}": rng.choice((1, 1, 1, 2, 3)) for n in range(rng.randint(0, 3))}
    there = ["batch"]
    tasks = []
    for n in range(1 + _rather_many(rng, most_tasks - 1)):
        reads = tuple(name for name in there if rng.random() < 0.4)
        sets = tuple(name for name in there if rng.random() < 0.1)
        if rng.random() < 0.8:
            sets += (f"a{n}",)
        deletes = tuple(name for name in there if name not in sets and rng.random() < 0.12)
        states = tuple(
            StateUse(state, writes=rng.random() < 0.6) for state in slots if rng.random() < 0.4
        )
        tasks.append(TaskSpec(f"t{n}", reads, sets, deletes, states, draws=rng.random() < 0.2))
        there = [name for name in dict.fromkeys((*there, *sets)) if name not in deletes]
    return Workload(tuple(tasks), slots)


def with_keep(rng: random.Random, workload: Workload) -> Workload:
    """Return tasks that alias attributes, or keep values outside; most declare their use."""
    there, tasks = ["batch"], list[TaskSpec]()
    for n, task in enumerate(workload.tasks):
        reads = tuple(dict.fromkeys((*task.reads, *(a for a in there if rng.random() < 0.1))))
        passed = [(name, f"p{n}") for name in reads if name not in task.deletes]
        savers = [one.name for one in tasks if one.saves] if rng.random() < 0.5 else []
        new = replace(
            task,
            reads=reads,
            passes=tuple(passed[:1]) if rng.random() < 0.3 else (),
            saves=rng.choice(reads) if reads and rng.random() < 0.4 else None,
            takes=savers[-1] if savers else None,
            known=rng.random() < 0.85,
        )
        tasks.append(new)
        made = (*task.sets, *(other for _, other in new.passes))
        there = [a for a in dict.fromkeys((*there, *made)) if a not in task.deletes]
    return Workload(tuple(_taken_once(tasks)), workload.slots)


def with_hosts(rng: random.Random, workload: Workload) -> Workload:
    """Return the workload with added tasks of the host alone, which use what they make."""
    slots = {f"host{n}": rng.choice((1, 1, 2, 3)) for n in range(rng.randint(1, 2))}
    there, numbers, more, tasks = ["batch"], list[str](), list[str](), list[TaskSpec]()
    for n, task in enumerate(workload.tasks):
        later = {name for one in workload.tasks[n:] for name in one.touches()}
        later |= {one.saves for one in workload.tasks[n:] if one.saves}
        if not n or rng.random() < 0.5:
            states = tuple(
                StateUse(s, writes=rng.random() < 0.7) for s in slots if rng.random() < 0.6
            )
            passes = [(name, f"h{n}p") for name in there if rng.random() < 0.4]
            carried = [state for state, writes in states if writes]
            carries = (carried[0], rng.choice(there), f"h{n}c") if carried and there else None
            deletes = tuple(a for a in (*there, *more) if a not in later and rng.random() < 0.2)
            host = TaskSpec(
                f"h{n}",
                reads=tuple(name for name in numbers if rng.random() < 0.5),
                sets=(f"h{n}n",),
                states=states,
                passes=tuple(passes[:1]),
                carries=carries if rng.random() < 0.4 else None,
                known=rng.random() < 0.85,
                on_host=True,
            )
            if {*deletes}.isdisjoint(host.touches()):
                host = replace(host, deletes=deletes)
            tasks.append(host)
            made = [name for name, changed in host.touches().items() if changed]
            numbers.append(f"h{n}n")
            more += [name for name in made if name not in host.deletes]
            gone = {*host.deletes}
            there = [name for name in there if name not in gone]
            numbers = [name for name in numbers if name not in gone]
            more = [name for name in more if name not in gone]
        reads = dict.fromkeys((*task.reads, *(name for name in more if rng.random() < 0.5)))
        new = replace(task, reads=tuple(reads))
        tasks.append(new)
        made = [*new.sets, *(other for _, other in new.passes)]
        there = [a for a in dict.fromkeys((*there, *made)) if a not in new.deletes]
    return Workload(tuple(tasks), workload.slots, slots)


def _taken_once(tasks: Iterable[TaskSpec]) -> Iterator[TaskSpec]:
    """Yield tasks such that what a task has left is taken by one other task only."""
    taken = set[str]()
    for task in tasks:
        yield replace(task, takes=None) if task.takes in taken else task
        taken |= {task.takes} if task.takes else set()


def dependences_of(workload: Workload) -> set[Edge]:
    """Return every order between two tasks that both use something, one of them changing it."""
    edges = set()
    for (i, first), (j, then) in permutations(enumerate(workload.tasks), 2):
        if i < j and _conflict(first.touches(), then.touches()):
            edges.add(Edge(then.name, first.name, 0))
        if then.takes == first.name:
            edges.add(Edge(then.name, first.name, 0))
        for state in _shared_states(first, then):
            if i < j:
                edges.add(Edge(then.name, first.name, 0))
            slots = workload.slots | workload.host_slots
            edges.add(Edge(then.name, first.name, slots[state]))
    return edges


def _conflict(a: dict[str, bool], b: dict[str, bool]) -> bool:
    return any(changes or b[name] for name, changes in a.items() if name in b)


def _shared_states(a: TaskSpec, b: TaskSpec) -> Iterator[str]:
    """Yield the states that both tasks use and one of them writes."""
    writes = dict(a.states)
    yield from (
        use.state for use in b.states if use.state in writes and (use.writes or writes[use.state])
    )


# -------------------------------------------------------------------------------------- plans


def random_plan(rng: random.Random, workload: Workload, most_workers: int = 1) -> PipelinePlan:
    """Return a plan that keeps all necessary orders, and passes verification.

    With ``most_workers``, some groups have several.
    """
    names = [task.name for task in workload.tasks]
    edges = dependences_of(workload)
    stage = _stages(rng, names, edges)
    several: dict[str, int] = {}
    if most_workers > 1:
        there = ("io", "net", "aux")
        several = {name: rng.randint(1, most_workers) for name in there}
        group_of = {name: rng.choice((DEFAULT_GROUP, *there)) for name in names}
        several = {name: several.get(group_of[name], 1) for name in names}
        edges |= _after_themselves(workload, several)
        _level(
            stage, [[n for n in names if group_of[n] == g and several[n] > 1] for g in there], edges
        )
    if rng.random() < 0.6:
        edges = _reduced(rng, edges, {name for name in several if several[name] > 1})
    groups = [DEFAULT_GROUP, *("io", "net", "aux")[: _rather_many(rng, 3)]]
    streams = [None, *("copy", "dist", "side")[: _rather_many(rng, 3)]]
    on_host = {task.name for task in workload.tasks if task.on_host}
    schedule = {
        name: TaskSchedule(
            stage=stage[name],
            stream=HOST if name in on_host and rng.random() < 0.9 else rng.choice(streams),
            thread_group=group_of[name] if several else rng.choice(groups),
            globally_ordered=rng.random() < (0.1 if several else 0.3),
            workers=several.get(name, 1),
        )
        for name in _shuffled(rng, names)
    }
    used = {entry.stream for entry in schedule.values() if isinstance(entry.stream, str)} - {HOST}
    plan = PipelinePlan(
        schedule=schedule,
        deps=[edge[:2] for edge in sorted(edges) if not edge.distance],
        cross_iter_deps=[edge for edge in sorted(edges) if edge.distance],
        streams={s: StreamSpec(rng.choice((0, -1))) for s in sorted(used) if rng.random() < 0.3},
        pipeline_depth=rng.choice(
            (None, max(stage.values()) + max([1, *several.values()]) + rng.randint(0, 2))
        ),
    )
    plan = _pulling(rng, _with_more(rng, plan))
    return replace(plan, within_calls=rng.random() < 0.2)


def _pulling(rng: random.Random, plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with batches pulled by the caller, by a group, or by one with tasks."""
    theirs = [group for group in plan.thread_groups[1:2] if plan.workers(group) == 1]
    group = rng.choice((None, None, "loader", *theirs))
    depth = plan.pipeline_depth
    if group is not None and depth is not None:
        depth = max(depth, plan.max_stage + 1 + plan.most_workers)
    return replace(plan, pull_group=group, pipeline_depth=depth)


def _stages(rng: random.Random, names: Sequence[str], edges: Iterable[Edge]) -> dict[str, int]:
    """Return random stages, raised until no dependence reads the future."""
    last = _rather_many(rng, 3)
    stage = {name: rng.randint(0, last) for name in names}
    changed = True
    while changed:
        changed = False
        for edge in edges:
            least = stage[edge.producer] - edge.distance
            if stage[edge.consumer] < least:
                stage[edge.consumer] = least
                changed = True
    return stage


def _after_themselves(workload: Workload, workers: Mapping[str, int]) -> set[Edge]:
    """Return the orders of tasks with their own earlier runs."""
    own = {Edge(name, name, count) for name, count in workers.items() if count > 1}
    slots = workload.slots | workload.host_slots
    return own | {
        Edge(task.name, task.name, slots[use.state])
        for task in workload.tasks
        if workers[task.name] > 1
        for use in task.states
        if use.writes
    }


def _level(stage: dict[str, int], groups: list[list[str]], edges: set[Edge]) -> None:
    """Raise stages until all tasks of a group share one, and no dependence reads the future."""
    before: dict[str, int] = {}
    while before != stage:
        before = dict(stage)
        for group in groups:
            stage.update(dict.fromkeys(group, max((stage[name] for name in group), default=0)))
        for edge in edges:
            least = stage[edge.producer] - edge.distance
            stage[edge.consumer] = max(stage[edge.consumer], least)


def _reduced(rng: random.Random, edges: set[Edge], several: Set[str] = frozenset()) -> set[Edge]:
    """Return the edges without those that others imply, which a user need not write.

    A task in ``several`` has more than one worker, so an earlier iteration need not be done
    earlier.
    """
    kept = set(edges)
    for edge in _shuffled(rng, sorted(edges)):
        others = kept - {edge}
        if not {edge.consumer, edge.producer} <= several and _implied(edge, others):
            kept = others
    return kept


def _implied(edge: Edge, others: Iterable[Edge]) -> bool:
    """Return whether a path of no greater distance leads from producer to consumer."""
    best = {edge.producer: 0}
    changed = True
    while changed:
        changed = False
        for other in others:
            if other.producer in best:
                total = best[other.producer] + other.distance
                if total <= edge.distance and total < best.get(other.consumer, total + 1):
                    best[other.consumer] = total
                    changed = True
    return edge.consumer in best


def _with_more(rng: random.Random, plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with ``same_period_deps``, added or replacing others, and an ``order``."""
    stage = {name: entry.stage for name, entry in plan.schedule.items()}
    for edge in (*((c, p, 0) for c, p in plan.deps), *plan.cross_iter_deps):
        consumer, producer, distance = edge
        # Of two iterations of one task the earlier ends earlier: a nearer one is as good.
        if min(plan.schedule[name].workers for name in edge[:2]) > 1:
            continue
        if 0 <= stage[producer] - stage[consumer] <= distance and rng.random() < 0.2:
            plan = _if_acyclic(
                plan,
                deps=[pair for pair in plan.deps if (*pair, 0) != edge],
                cross_iter_deps=[other for other in plan.cross_iter_deps if other != edge],
                same_period_deps=[*plan.same_period_deps, (consumer, producer)],
            )
    names = list(plan.schedule)
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        pair = (rng.choice(names), rng.choice(names))
        plan = _if_acyclic(plan, same_period_deps=[*plan.same_period_deps, pair])
    for _ in range(rng.choice((0, 3))):
        plan = _if_acyclic(plan, order=_shuffled(rng, names)[: rng.randint(1, 3)])
    return plan


def _if_acyclic(plan: PipelinePlan, **changes: Iterable[Sequence[Any]]) -> PipelinePlan:
    """Return the changed plan, or the plan as it was if the change makes a cycle."""
    old = {field.name: getattr(plan, field.name) for field in fields(plan) if field.init}
    changed = PipelinePlan(**{**old, **changes})
    try:
        resolve_plan(changed)
    except CycleError:
        return plan
    return changed


def _rather_many(rng: random.Random, most: int) -> int:
    """Return a number from 0 to ``most``, more often a large than a small one."""
    return max(rng.randint(0, most), rng.randint(0, most))


def _shuffled(rng: random.Random, items: Iterable[T]) -> list[T]:
    shuffled = list(items)
    rng.shuffle(shuffled)
    return shuffled


# -------------------------------------------------------------------------------------- cases


def draw_case(
    rng: random.Random,
    most_tasks: int = 7,
    workload: Workload | None = None,
    most_workers: int = 1,
) -> Case:
    """Draw a workload, a plan, and data whose length is from 0 to three depths."""
    workload = workload or random_workload(rng, most_tasks)
    plan = random_plan(rng, workload, most_workers)
    count = _rather_many(rng, 3 * plan.depth)
    batches = tuple(None if rng.random() < 0.15 else rng.randint(0, 999) for _ in range(count))
    drains = frozenset(n for n in range(count) if rng.random() < rng.choice((0.0, 0.0, 0.2)))
    return Case(workload, plan, batches, drains, rng.randint(0, 2**16))


def with_run_ahead(case: Case) -> Case:
    """Return the case with a run-ahead limit of its own, or with the default."""
    ahead = random.Random(case.seed).choice((None, None, 0, 1, 2, 3))
    return replace(case, plan=replace(case.plan, run_ahead=ahead))


def keeping_case(seed: int, most_tasks: int = 7) -> Case:
    """Return the case of a seed, under a plan that keeps only some attributes."""
    rng = random.Random(seed)
    workload = with_keep(rng, random_workload(rng, most_tasks))
    case = draw_case(rng, most_tasks, workload)
    keep = [name for name in _left(workload) if rng.random() < 0.2]
    return replace(case, plan=replace(case.plan, keep=keep))


MOST_WORKERS = 4


def worked_case(seed: int, most_tasks: int = 7) -> Case:
    """Return the case of a seed, with groups of several workers; half of them keep little."""
    rng = random.Random(seed)
    workload = random_workload(rng, most_tasks)
    if not seed % 2:
        return draw_case(rng, most_tasks, workload, MOST_WORKERS)
    workload = with_keep(rng, workload)
    case = draw_case(rng, most_tasks, workload, MOST_WORKERS)
    keep = [name for name in _left(workload) if rng.random() < 0.2]
    return replace(case, plan=replace(case.plan, keep=keep))


def hosted_case(seed: int, most_tasks: int = 5) -> Case:
    """Return the case of a seed, with host tasks; some keep little, some have workers."""
    rng = random.Random(seed)
    workload = random_workload(rng, most_tasks)
    keeps = not seed % 2
    workload = with_hosts(rng, with_keep(rng, workload) if keeps else workload)
    case = draw_case(rng, most_tasks, workload, 1 if seed % 3 else MOST_WORKERS)
    if keeps:
        keep = [name for name in _left(workload) if rng.random() < 0.2]
        case = replace(case, plan=replace(case.plan, keep=keep))
    return case


def _left(workload: Workload) -> Iterable[str]:
    """Return the attributes that an iteration has in the end."""
    there = {"batch": True}
    for task in workload.tasks:
        there |= dict.fromkeys(task.touches(), True) | dict.fromkeys(task.deletes, False)
    return (name for name, is_there in there.items() if is_there)


def random_case(seed: int, most_tasks: int = 7) -> Case:
    """Return the case of a seed."""
    return draw_case(random.Random(seed), most_tasks)


def cases(most_tasks: int = 7, most_workers: int = 1) -> st.SearchStrategy[Case]:
    """Return a strategy of cases that hypothesis can shrink."""
    rng = st.randoms(use_true_random=False)
    return st.builds(draw_case, rng, st.just(most_tasks), st.none(), st.just(most_workers))
