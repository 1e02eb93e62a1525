"""The automatic planner: the shortest interval, then the least depth, then the fewest threads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

from swpipe.analysis import verify
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.races import required_orders, violations
from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.effects import (
    DRAWS,
    Conflict,
    EffectTable,
    Location,
    conflicts,
    undeclared_effects,
    with_the_others,
)
from swpipe.core.messages import counted, in_bytes, in_ms, listed
from swpipe.core.plan import BODY, OTHERS, PULL, PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.errors import PlanError, Problem
from swpipe.planning.limits import Limits
from swpipe.planning.modulo.bounds import Bounds, bounds_of
from swpipe.planning.modulo.input_slack import with_slack
from swpipe.planning.modulo.schedule_graph import (
    TOLERANCE,
    ScheduleGraph,
    least_stages,
    schedule_graph,
)
from swpipe.planning.modulo.search import LIMITS_SHARE, FoundPlan, Search
from swpipe.planning.rank_simulation import rank_step
from swpipe.planning.ranks import Ranks, RankStep
from swpipe.planning.simulation.interval import interval_us
from swpipe.planning.simulation.simulator import peak_of
from swpipe.program import compile_plan

PULL_GROUP = "loader"
"""The name of the thread group that pulls batches, if the planner adds one."""

MOST_TASKS = 1_000
"""The largest number of tasks that can be planned."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, and the reasons for it.

    Attributes:
        plan: The chosen plan.
        ii_us: The interval that the simulator predicts for it, in microseconds.
        bounds: Lower bounds on the interval of every plan within the limits.
        why: A sentence for each reason: what limits the interval, how much each thread saves, what
            the depth is for.
        ranks: The step on many ranks; None if no ranks were given.
    """

    plan: PipelinePlan
    ii_us: float
    bounds: Bounds
    why: tuple[str, ...]
    ranks: RankStep | None = None

    @property
    def in_flight(self) -> int:
        """The number of iterations in flight, which is the plan's depth."""
        return self.plan.depth

    @property
    def threads(self) -> int:
        """The number of threads, including the caller's."""
        return self.plan.threads

    @property
    def gap(self) -> float:
        """The relative distance of the interval from the lower bound; 0.01 is 1%."""
        return self.bounds.gap(self.ii_us)

    def format(self) -> str:
        """Return a head line and the reasons, one per line."""
        head = (
            f"{in_ms(self.ii_us)} per iteration, {counted(self.in_flight, 'iteration')} in flight, "
            f"{counted(self.threads, 'thread')}"
        )
        return "\n".join([head, *(f"  {sentence}" for sentence in self.why)])


def auto_plan(
    plan: PipelinePlan,
    costs: CostModel,
    *,
    limits: Limits | None = None,
    streams: bool = True,
    effects: EffectTable | None = None,
    effort: float = 1.0,
    body: bool = True,
    slack: float = 0.0,
    ranks: Ranks | None = None,
) -> Choice:
    """Plan a loop by modulo scheduling.

    The planner chooses stages, thread groups, order and depth. Dependences, streams, global order,
    ``run_ahead``, ``stale`` and ``newer`` stay as they are. A pair of
    ``same_period_deps`` keeps the distance that the stages of ``plan`` give it. If ``costs`` has a
    cost of ``PULL``, a thread group of its own pulls the batches where that makes iterations
    shorter: the loader must use nothing that the tasks change. A thread that is always busy gets
    more workers as long as they make iterations shorter, if ``effects`` let its tasks run on
    several iterations at once.

    Args:
        plan: The tasks' names, dependences, streams and global order. Its stages, groups, order and
            depth have no other influence.
        costs: A cost for each task.
        limits: Limits on the plan; None for ``Limits()``. Under ``max_bytes`` the search is
            repeated for fewer iterations in flight, until a plan fits; less ``run_ahead`` is tried
            before less depth.
        streams: Whether the device has streams; False for a CPU.
        effects: The effects of the tasks, if known: the plan found must keep their order. Tasks
            that share a location with the loop's body stay with it, as if ``limits`` froze them. If
            the loader shares one with the tasks or the body, one iteration is in flight. A table
            without the entry ``"<pull>"`` means that the loader may touch everything.
        effort: The length of the search if the lower bound is not reached: 1 takes about a second
            for 14 tasks, ten seconds for 200 and a minute for 1,000.
        body: Whether the loop has a body, as with ``iterate()`` and ``progress()``; False for
            ``run()``.
        slack: The fraction by which the interval may be longer if fewer threads then suffice; 0.01
            is 1%.
        ranks: Ranks to plan for: batches are made ahead of the first task that meets other ranks,
            and the host runs ahead of the device, as far as this makes the step of the ranks
            shorter. ``ii_us`` and ``bounds`` remain those of one rank.

    Raises:
        ValueError: ``effort`` is not above 0.
        PlanError: ``plan`` cannot run or has more than ``MOST_TASKS`` tasks, a task has no cost, a
            frozen task is unknown, the limits admit no plan, no plan was found within
            ``limits.max_bytes``, dependences are missing for the effects given, or ``ranks`` does
            not fit the plan.
    """
    if not effort > 0:
        raise ValueError(f"effort is {effort}: it must be above 0")
    if len(plan.schedule) > MOST_TASKS:
        rule = f"at most {MOST_TASKS} are planned: join some of them"
        raise PlanError([Problem(f"the plan has {len(plan.schedule)} tasks, but {rule}")])
    limits = limits if limits is not None else Limits()
    limits.check(plan)
    if ranks is not None:
        ranks.meeting(plan, costs)
    why: list[str] = []
    if effects is not None:
        # An undeclared loader or body is taken to touch everything that any task touches.
        effects = with_the_others(
            effects, undeclared_effects(effects.values()), apart=False, body=body
        )
        limits, why = beside_the_others(limits, effects)
    if limits.max_bytes is not None and costs.memory is None:
        mend = "give CostModel(memory=measure_memory(tasks, batches))"
        raise PlanError([Problem(f"max_bytes needs what the tasks hold: {mend}")])

    # The order of the three steps matters: memory restricts the depth, and input slack for ranks is
    # added to a plan that fits.
    planner = _Planner(plan, costs, limits, streams, effects, effort, slack)
    best = planner.best()
    if limits.max_bytes is not None:
        best = planner.fitting(best, limits.max_bytes)
    if ranks is not None:
        best = planner.for_ranks(best, ranks)
    best = replace(best, why=(*best.why, *why))
    if effects is not None:
        verify(best.plan, effects=effects, streams=streams, body=body)
    return best


@dataclass(frozen=True, slots=True)
class _Planner:
    """The planner of a loop; its fields are the arguments of ``auto_plan``."""

    plan: PipelinePlan
    costs: CostModel
    limits: Limits
    streams: bool
    effects: EffectTable | None
    effort: float
    slack: float

    def best(self) -> Choice:
        """Return the best plan found.

        The pull is on the caller's thread or, if that is faster, in a group of its own.
        """
        best = self._choice()
        pull = self.costs.tasks.get(PULL, TaskCost())
        # A group that pulls needs a second thread and a second iteration in flight.
        apart = self.plan.pull_group is None and min(self.limits.groups, self.limits.in_flight) > 1
        if apart and pull.host_us:
            other = replace(self.plan, pull_group=PULL_GROUP, pipeline_depth=None)
            pulling = replace(self, plan=other)._choice()
            saved_us = best.ii_us - pulling.ii_us
            # Equal intervals go to the plan with one thread less.
            if saved_us > TOLERANCE * best.ii_us:
                words = (
                    f"Batches are pulled on a thread of their own, which earns {in_ms(saved_us)}."
                )
                best = replace(pulling, why=(*pulling.why, words))
        # The bound knows of workers: a plan that reaches it needs none.
        if best.gap <= TOLERANCE or not self.concurrent:
            return best
        # The best groups of one worker each need not be the best of several: a group has workers
        # only if each of its tasks may have them.
        grouped = (best, self._grouped_for_workers(best))
        return min(map(self._by_workers, grouped), key=lambda choice: choice.ii_us)

    @property
    def concurrent(self) -> tuple[str, ...]:
        """The tasks that may have several workers: their effects allow them beside themselves."""
        if self.effects is None or self.limits.workers == 1:
            return ()
        pairs = conflicts(self.effects)
        alone = {pair.consumer for pair in pairs if pair.consumer == pair.producer}
        # Frozen tasks are on the caller's thread, which has no workers.
        alone.update(self.limits.frozen)
        return tuple(name for name in self.plan.schedule if name not in alone)

    def _one_by_one(self) -> str:
        costs = self.costs.of(self.plan.schedule).values()
        total_us = sum(cost.total_us for cost in costs)
        return f"All tasks one after the other take {in_ms(total_us)}."

    def _grouped_for_workers(self, best: Choice) -> Choice:
        """Return the plan whose groups are the best ones if each has all workers, with one each."""
        costs = dict(self.costs.tasks)
        for name in self.concurrent:
            costs[name] = costs[name].scaled(1 / self.limits.workers)
        plan = replace(self, costs=replace(self.costs, tasks=costs), effects=None)._choice().plan
        ii_us = self._interval_us(plan)
        why = (_above(ii_us, best.bounds), self._one_by_one())
        return replace(best, plan=plan, ii_us=ii_us, why=why)

    def _by_workers(self, best: Choice) -> Choice:
        """Return the plan with more workers in busy groups, while each worker makes it faster."""
        fastest = best
        # Greedy, one worker at a time.
        while (faster := self._by_one_worker(fastest)) is not None:
            fastest = faster
        if fastest is best:
            return best
        several = {
            e.thread_group: e.workers for e in fastest.plan.schedule.values() if e.workers > 1
        }
        words = listed([f"{counted(n, 'worker')} of {group!r}" for group, n in several.items()])
        saved = in_ms(best.ii_us - fastest.ii_us)
        why = f"{words} take turns, each with iterations of its own, which earns {saved}."
        above = _above(fastest.ii_us, fastest.bounds)
        return replace(fastest, why=(above, *best.why[1:], why))

    def _by_one_worker(self, choice: Choice) -> Choice | None:
        """Return a faster plan with one more worker in each busy group, if there is one."""
        schedule = choice.plan.schedule
        load: dict[str, float] = defaultdict(float)
        for name, cost in self.costs.of(schedule).items():
            load[schedule[name].thread_group] += cost.total_us / schedule[name].workers
        # Only a group that is busy for the whole interval can limit it.
        least_us = choice.ii_us * (1 - TOLERANCE)
        busy = {group for group, us in load.items() if us >= least_us}
        for plan in _with_one_more(choice.plan, busy) if busy else ():
            # More workers may need a greater depth, and may change the order that effects require.
            if self.limits.allow(plan) and self._keeps(plan):
                ii_us = self._interval_us(plan)
                if ii_us < least_us:
                    return replace(choice, plan=plan, ii_us=ii_us)
        return None

    def _keeps(self, plan: PipelinePlan) -> bool:
        """Return whether a plan can run and keeps the serial order wherever the order matters."""
        if self.effects is None:
            return True
        try:
            before = HappensBefore.of(validate(plan), streams=self.streams)
        except PlanError:
            return False
        return not violations(required_orders(self.effects, plan.stale, plan.newer), [before])

    def _interval_us(self, plan: PipelinePlan) -> float:
        return interval_us(plan, self.costs, streams=self.streams)

    def _bytes(self, plan: PipelinePlan) -> int:
        """Return the peak memory of a plan; 0 if the costs do not have the tasks' memory."""
        peak = peak_of(plan, self.costs, streams=self.streams)
        return 0 if peak is None else peak.bytes

    def _choice(self) -> Choice:
        """Return the best plan found, with the pull in the thread group that ``plan`` gives it."""
        plan = self.plan
        limits = self.limits
        # The group that pulls takes one thread, and the batch that it pulls ahead is one iteration
        # in flight.
        if plan.pull_group is not None:
            if min(limits.groups, limits.in_flight) == 1:
                text = (
                    f"pull_group {plan.pull_group!r} is a second thread group, and pulls a second "
                    "iteration: set the limits groups and in_flight to 2 or more, or leave it "
                    "out"
                )
                raise PlanError([Problem(text)])
            limits = replace(limits, in_flight=limits.in_flight - 1, groups=limits.groups - 1)
        graph = schedule_graph(
            validate(plan), self.costs, streams=self.streams, frozen=limits.frozen
        )
        # First rule out limits without any plan, so that the search always has one to begin with.
        _admits(graph, limits)
        search = Search(plan, self.costs, graph, self.effort)
        best = _least(search, limits, self.slack)
        bounds = bounds_of(
            graph,
            limits.groups,
            limits.in_flight,
            concurrent=self.concurrent,
            workers=limits.workers,
        )
        why = (*_why(best, bounds, search), self._one_by_one())
        return Choice(best.plan, best.ii_us, bounds, why)

    def fitting(self, free: Choice, max_bytes: int) -> Choice:
        """Return the fastest plan found that holds at most ``max_bytes``, by the simulator.

        The fastest plan for each number of iterations in flight is tried, from the largest number
        to the smallest: unchanged, and with less ``run_ahead`` and depth. The search ends where
        plans with fewer iterations in flight are no faster than one that fits.

        Args:
            free: The fastest plan found without a limit on memory.
            max_bytes: The limit in bytes.

        Raises:
            PlanError: No plan was found that fits; the message has the smallest peak.
        """
        best = replace(free, ii_us=math.inf)
        least = 0
        for candidate in self._of_less_depth(free):
            if candidate.ii_us >= best.ii_us:
                break
            for plan in _smaller(candidate.plan, streams=self.streams):
                size = self._bytes(plan)
                least = min(least or size, size)
                if size <= max_bytes and (ii_us := self._interval_us(plan)) < best.ii_us:
                    best = replace(free, plan=plan, ii_us=ii_us)
        if math.isinf(best.ii_us):
            text = (
                f"no plan was found that holds max_bytes of {in_bytes(max_bytes)} at most; the "
                f"smallest peak found is {in_bytes(least)}, {least} bytes: allow that, or take "
                "smaller batches"
            )
            raise PlanError([Problem(text)])
        why = (
            f"The limit of {in_bytes(max_bytes)} costs {in_ms(max(0.0, best.ii_us - free.ii_us))} "
            f"per iteration: without it {in_ms(free.ii_us)}."
        )
        known = free.why if best.plan == free.plan else ()
        return replace(best, why=(*known, why))

    def for_ranks(self, free: Choice, ranks: Ranks) -> Choice:
        """Return the given plan with the input slack that many ranks need."""

        # Slack adds iterations in flight, so order and memory have to be checked again.
        def allowed(plan: PipelinePlan) -> bool:
            most = self.limits.max_bytes
            return self._keeps(plan) and (most is None or self._bytes(plan) <= most)

        chosen, why = with_slack(
            free.plan,
            self.costs,
            ranks,
            self.limits,
            streams=self.streams,
            may_run_ahead=self.plan.run_ahead is None,
            allowed=allowed,
        )
        program = compile_plan(resolve_plan(chosen.plan), streams=self.streams)
        # The search compares steps only; the parts and the floor are computed once, for the final
        # plan.
        step = rank_step(program, self.costs, ranks)
        reasons = (*free.why, step.format(), why)
        return replace(free, plan=chosen.plan, ii_us=step.work_us, why=reasons, ranks=step)

    def _of_less_depth(self, free: Choice) -> Iterator[Choice]:
        yield free
        # The last attempt is the serial plan: one iteration on one thread.
        depths = range(free.in_flight - 1, 0, -1)
        fewer = [replace(self.limits, in_flight=depth) for depth in depths]
        for limits in (*fewer, replace(self.limits, in_flight=1, groups=1)):
            # The limits may admit no plan with so few iterations in flight.
            with suppress(PlanError):
                yield replace(self, limits=limits).best()


def _with_one_more(plan: PipelinePlan, groups: Set[str]) -> Iterator[PipelinePlan]:
    """Yield plans with one more worker in some groups, whose tasks then share one stage each."""
    # Workers take turns by iteration, so all tasks of their group work on the same iteration in a
    # period: either the latest stage or the earliest is tried for all of them.
    for pick in (max, min):
        schedule = dict(plan.schedule)
        for group in groups:
            own = [n for n, entry in schedule.items() if entry.thread_group == group]
            stage = pick(schedule[name].stage for name in own)
            for name in own:
                workers = schedule[name].workers + 1
                schedule[name] = replace(schedule[name], stage=stage, workers=workers)
        yield replace(plan, schedule=schedule, pipeline_depth=None)


def shared_with_body(pairs: Iterable[Conflict]) -> dict[str, set[Location]]:
    """Return the locations that each task shares with the loop's body; these tasks stay with it."""
    shared: dict[str, set[Location]] = {}
    for each in pairs:
        if each.consumer == BODY and each.producer not in OTHERS and each.place != DRAWS:
            shared.setdefault(each.producer, set()).add(each.place)
    return shared


def beside_the_others(limits: Limits, effects: EffectTable) -> tuple[Limits, list[str]]:
    """Return limits that keep tasks which share state with the body in its stage, and the reasons.

    Args:
        limits: The limits given.
        effects: The effects of the tasks, of the loader and, if there is one, of the body.
    """
    pairs = conflicts(effects)
    shared = shared_with_body(pairs)
    # A conflict of the pull with another consumer or producer forbids that it runs ahead of them.
    pulls_in_turn = any(PULL in each[:2] and each.consumer != each.producer for each in pairs)
    # Undeclared tasks need a declaration; declared ones share a named state. The advice differs.
    silent = [name for name in shared if effects[name].undeclared]
    why = []
    named = [name for name in shared if name not in silent]
    if silent:
        their = "its" if len(silent) == 1 else "their"
        why.append(
            f"{_stay(silent)}, because {their} effects are not declared: declare pure=True, or the "
            "states in io."
        )
    if named:
        states = sorted({str(place) for name in named for place in shared[name]})
        why.append(
            f"{_stay(named)}, which may touch {listed(states)}: declare "
            'others="" for a state that it does not touch.'
        )
    if pulls_in_turn:
        limits = replace(limits, in_flight=1)
        why.append(
            "Batches are not pulled ahead, because the effects of the loader are not declared. If "
            "they come from a list or a DataLoader with workers, pass it as loader=."
        )
    return replace(limits, frozen=tuple(dict.fromkeys((*limits.frozen, *shared)))), why


def _least(search: Search, limits: Limits, slack: float) -> FoundPlan:
    """Return the plan of the least interval; among equals, of the least depth, then threads."""
    best = search.best(limits.groups, limits.in_flight)
    # Tighten one limit at a time: first the depth, since each iteration in flight holds a batch in
    # memory, then the threads.
    while best.depth > 1 and (better := _within(search, best, limits.groups, best.depth - 1)):
        best = better
    for threads in range(1, best.schedule.threads):
        if better := _within(search, best, threads, best.depth, slack):
            best = better
            break
    return search.tidy(best)


def _within(
    search: Search, best: FoundPlan, threads: int, depth: int, slack: float = 0.0
) -> FoundPlan | None:
    """Return a plan found under tighter limits that is no slower than the best one, or None."""
    most_us = best.ii_us * (1 + slack + TOLERANCE)
    # The bound is cheap, and often proves that the limits are too tight.
    if search.bound_us(threads, depth) > most_us:
        return None
    plan = search.reach(best.ii_us, threads, depth, share=LIMITS_SHARE)
    return plan if plan is not None and plan.ii_us <= most_us else None


def _admits(graph: ScheduleGraph, limits: Limits) -> None:
    """Refuse limits that admit no plan, because pairs reach into later iterations.

    The consumer of a pair of negative distance is in a later stage than its producer. So no frozen
    task, which is in the last stage, may come before the consumer. Otherwise a cycle of the graph
    has no distance, and no interval is long enough for it.
    """
    reaching = [(graph.names[c], graph.names[p]) for c, p, d in graph.deps if d < 0]
    pairs = ", ".join(f"{c} after {p}" for c, p in reaching)
    # The tasks that would have to be in a later stage than the frozen tasks.
    stages = least_stages(graph.deps, dict.fromkeys(graph.frozen, 0))
    late = [graph.names[v] for v, stage in stages.items() if stage > 0]
    if graph.least_depth > limits.in_flight:
        what = f"the limit of {counted(limits.in_flight, 'iteration')} in flight admits no plan"
        mend = f"set in_flight to {graph.least_depth} or more"
    elif late:
        frozen = listed(sorted(limits.frozen))
        what = f"the limits freeze {frozen} in the last stage, but {listed(late)} must be later"
        mend = "leave a task of these pairs out of frozen"
    else:
        return
    text = f"{what}: same_period_deps reach into later iterations ({pairs}); {mend}"
    raise PlanError([Problem(text, tuple(dict.fromkeys(n for pair in reaching for n in pair)))])


def _smaller(plan: PipelinePlan, *, streams: bool) -> Iterator[PipelinePlan]:
    """Yield the plan with less and less run-ahead, then with less depth as well."""
    for depth in range(plan.depth, plan.least_depth - 1, -1):
        shallow = replace(plan, pipeline_depth=depth)
        yield shallow
        if streams and plan.names_streams:
            for ahead in range((plan.launch_limit or 0) - 1, -1, -1):
                yield replace(shallow, run_ahead=ahead)


# ------------------------------------------------------------------------------------------ words


def _stay(names: Sequence[str]) -> str:
    return f"{listed(names)} stay{'s' * (len(names) == 1)} with the loop's body"


def _above(ii_us: float, bounds: Bounds) -> str:
    gap = bounds.gap(ii_us)
    above = "optimal by these costs:" if gap < 1e-6 else f"{gap:.2%} above"
    bound = f"the lower bound of {in_ms(bounds.ii_us)}, which is set by {bounds.limiting}"
    return f"The predicted interval is {above} {bound}."


def _why(best: FoundPlan, bounds: Bounds, search: Search) -> list[str]:
    words = [_above(best.ii_us, bounds)]
    if best.schedule.threads == 1:
        words.append("The caller's thread is enough for the tasks.")
    for threads in range(2, best.schedule.threads + 1):
        fewer_us = search.bound_us(threads - 1, best.depth)
        saved_us = fewer_us - max(best.ii_us, search.bound_us(threads, best.depth))
        words.append(
            f"Thread {threads} earns {in_ms(saved_us)}: without it no plan of this depth is below "
            f"{in_ms(fewer_us)}."
            if saved_us > 0
            else f"Thread {threads}: no plan of this interval and depth was found without it."
        )
    return words
