"""What to change next: the changes to a plan that promise most, by what was measured.

For each task that is worth it, these are tried on paper:

    ahead     the task, and what it needs, on a thread of its own, one iteration ahead of the rest
    beside    the task on a thread of its own, in the same period
    earlier   the task, and what it needs, one iteration ahead, on the threads they have
    faster    the task takes half as long
    pulled    the loader is called on a thread of its own

The planner's simulator predicts the iteration under each plan from the measured times, in
proportion to what it says for the plan that was measured. The cores that there are limit it too.
Moving tasks cannot save more than their exposed times, so that is the most that is promised; and
nothing is, where the interval of what is saved contains 0. If the plan declares no dependences
between iterations, it is not known which task may move, and none is moved; nor is a task of which
nothing is declared, away from the loop's body.

What the planner says of plans and cycles names every task and iteration. Here it is said in short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from swpipe._distributed.shared_cores import cores, ranks_on_machine
from swpipe.analysis.races import race_problems
from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.effects import declared_effects, unknown_beside, with_the_others
from swpipe.core.messages import counted, listed
from swpipe.core.plan import DEFAULT_GROUP, PULL, PipelinePlan, TaskSchedule
from swpipe.core.resolved import dependences_of
from swpipe.errors import PlanError, Problem
from swpipe.profiler.diff import ms
from swpipe.profiler.measured import Measured
from swpipe.profiler.spread import Estimate

if TYPE_CHECKING:
    from swpipe.planning.simulation.interval import Limit

MOST = 3
"""So many changes are named."""

LEAST = 0.02
"""Less than this part of an iteration is not promised, and not known so well."""

MORE = 1.1
"""A change that moves more tasks has to promise so many times as much."""

ERROR = 0.1
"""How far predicted iterations may be off: the simulator knows no contention for memory, or for
the interpreter lock."""

_FEW = 4  # tasks that are named

_US = 1e6


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, and what it promises.

    Attributes:
        change: What to change, in words.
        task: The task that it is about.
        saved_s: How much shorter an iteration is predicted to be, in seconds.
        spread_s: Half-width of the interval of ``saved_s``.
        limit: What limits iterations then.
        not_moved: Why the task is not moved instead; "" if it is.
        plan: The plan to try, as JSON (``PipelinePlan.from_json``); "" if the plan stays.
    """

    change: str
    task: str
    saved_s: float
    spread_s: float
    limit: str
    not_moved: str
    plan: str

    @property
    def text(self) -> str:
        """One sentence or two."""
        why = f" Not moved: {self.not_moved}." if self.not_moved else ""
        return (
            f"{self.change}: saves {ms(self.saved_s)} ± {ms(self.spread_s)} ms; "
            f"then limited by {self.limit}.{why}"
        )


class _Change(NamedTuple):
    """``place`` makes the new plan, in which ``moved`` are elsewhere; None if the plan stays."""

    task: str
    moved: tuple[str, ...]
    words: str
    place: Callable[[], PipelinePlan] | None
    costs: CostModel

    def is_instead_of(self, other: _Change) -> bool:
        """Whether only the better one of the two is told."""
        return self.task == other.task and (self.place is None) == (other.place is None)


def advise(measured: Measured) -> tuple[Advice, ...]:
    """The changes that promise most; the best comes first.

    None if the plan is too large to be simulated.
    """
    try:
        paper = _Paper(measured)
    except PlanError:
        return ()
    found = [(change, paper.advice(change)) for change in _changes(paper)]
    # Of changes that promise about the same, the smallest is the one to try.
    found.sort(key=lambda pair: len(pair[0].moved))
    kept: list[tuple[_Change, Advice]] = []
    for change, advice in found:
        if advice is not None and not any(
            set(less.moved) <= set(change.moved) and advice.saved_s < MORE * other.saved_s
            for less, other in kept
        ):
            # Another plan needs no other program: it is told beside what needs one.
            kept = [each for each in kept if not each[0].is_instead_of(change)] + [(change, advice)]
    best = sorted((advice for _, advice in kept), key=lambda advice: -advice.saved_s)
    return tuple(best[:MOST])


class _Paper:
    """Predicts iterations."""

    def __init__(self, measured: Measured) -> None:
        timer, times = measured.timer, measured.times
        self.measured = measured
        self._streams = timer.pipe.device.has_streams
        tasks = timer.pipe.tasks
        effects, unknown = declared_effects(tasks), unknown_beside(tasks)
        # A loader of which nothing is known is advised on with that condition.
        self._declared = with_the_others(effects, unknown, apart=True, body=True)
        self._cpu_us = _US * ranks_on_machine() * sum(times.cpu_s.values())  # of all ranks
        self.plan = timer.pipe.plan if timer.pipelined else _in_one_stage(timer.pipe.plan)
        self.costs = CostModel(
            {
                name: TaskCost(_US * s, device_us=_US * measured.device_s.get(name, 0.0))
                for name, s in times.host_s.items()
            }
        )
        self.not_moved: dict[str, str] = {}  # task to why it does not help to move it
        self._now_us, _ = self.predict(self.plan, self.costs)
        self._known = self._broken(self.plan)

    def _broken(self, plan: PipelinePlan) -> dict[tuple[str, ...], str]:
        """The orders that a plan does not keep, by the tasks that they are about."""
        found = race_problems(validate(plan), self._declared, streams=self._streams)
        return {problem.tasks: problem.text for problem in found}

    def predict(self, plan: PipelinePlan, costs: CostModel) -> tuple[float, str]:
        """Microseconds of an iteration, and what limits it, in short.

        Raises:
            PlanError: The plan cannot run.
        """
        from swpipe.planning.simulation.simulator import simulate

        simulated = simulate(plan, costs, streams=self._streams)
        cores_us = self._cpu_us / cores()
        if cores_us > simulated.ii_us:
            return cores_us, f"the {counted(cores(), 'core')}"
        return simulated.ii_us, _limit(simulated.limits)

    def advice(self, change: _Change) -> Advice | None:
        """What a change promises.

        None if the plan cannot run, or breaks an order that the present one keeps, or it is not
        worth it.
        """
        try:
            plan = change.place() if change.place else self.plan
            broken = self._broken(plan)
            for tasks in broken.keys() - self._known.keys():
                raise PlanError([Problem(broken[tasks], tasks)])
            then_us, limit = self.predict(plan, change.costs)
        except PlanError as error:
            self.not_moved.setdefault(change.task, self._fault(error.problems[0]))
            return None
        if not self._now_us:
            return None
        step_s, moved = self.measured.step, change.place is not None
        known = self.measured.exposed
        each = [known[task] for task in change.moved if task in known]
        # Together they save the sum at most, which is right if none hides another.
        most_s = sum(max(0.0, one.value_s) for one in each)
        exposed = Estimate(most_s, math.hypot(*(one.spread_s for one in each)))
        then_s = step_s.value_s * then_us / self._now_us
        saved_s = step_s.value_s - then_s
        saved_s = min(saved_s, exposed.value_s if moved else exposed.value_s / 2)
        error_s = exposed.spread_s / 2
        if moved:
            error_s = max(step_s.spread_s, exposed.spread_s) + ERROR * then_s
        if saved_s <= max(error_s, LEAST * step_s.value_s):
            if moved:
                why = f"iterations would be limited by {limit}"
                if saved_s > LEAST * step_s.value_s:
                    why = f"it might save {ms(saved_s)} ± {ms(error_s)} ms, and may save nothing"
                self.not_moved.setdefault(change.task, why)
            return None
        return Advice(
            change=change.words,
            task=change.task,
            saved_s=saved_s,
            spread_s=error_s,
            limit=limit,
            not_moved="" if moved else self.not_moved.get(change.task, ""),
            plan=_as_json(plan) if moved else "",
        )

    def _fault(self, problem: Problem) -> str:
        """Why a plan cannot run, in short."""
        tasks = problem.tasks
        if len(tasks) == 1 and self._declared[tasks[0]].undeclared:
            rule = "say pure=True, or name its states in io"
            return f"nothing is declared of what {tasks[0]!r} touches: {rule}"
        return f"the order of {listed(tasks, _FEW)} would not be kept" if tasks else problem.text


def _changes(paper: _Paper) -> Iterator[_Change]:
    """All changes; those that move a task come first, so that it is known why they do not help."""
    plan, costs = paper.plan, paper.costs
    for task in paper.measured.exposed:
        if task == PULL:
            if plan.pull_group is None:
                own = _new_group(plan, "loader")
                depth = None if plan.pipeline_depth is None else plan.pipeline_depth + 1
                place = partial(replace, plan, pull_group=own, pipeline_depth=depth)
                words = "call the loader on a thread of its own"
                pulls = paper.measured.timer.pulls
                if pulls is not None and pulls.effects.undeclared:
                    words += ", if it uses nothing that the loop changes"
                yield _Change(task, (task,), words, place, costs)
        elif plan.cross_iter_deps:
            needed = [name for name in plan.schedule if name in _needs(plan, task)]
            named = f"{task}, with {', '.join(needed)} before it," if needed else task
            together, own = (*needed, task), _new_group(plan, task)
            place = partial(_ahead, plan, together, own)
            words = f"run {named} on a thread of its own, one iteration ahead"
            yield _Change(task, together, words, place, costs)
            place = partial(_moved, plan, {task: own}, {})
            yield _Change(task, (task,), f"run {task} on a thread of its own", place, costs)
            if len(plan.thread_groups) > 1:
                place = partial(_ahead, plan, together)
                yield _Change(task, together, f"run {named} one iteration ahead", place, costs)
        else:
            paper.not_moved[task] = (
                "the plan declares no dependences between iterations; record the loop to find them"
            )
        cost = costs.tasks[task]
        half = replace(cost, host_us=cost.host_us / 2, device_us=cost.device_us / 2)
        faster = CostModel({**costs.tasks, task: half})
        yield _Change(task, (task,), f"make {task} take half as long", None, faster)


def _needs(plan: PipelinePlan, task: str) -> set[str]:
    """What runs before the task on the same iteration, on the same thread and in the same stage."""
    place = plan.schedule[task]
    alike = {
        name
        for name, other in plan.schedule.items()
        if (other.stage, other.thread_group) == (place.stage, place.thread_group)
    }
    deps = [dep for dep in dependences_of(plan) if not dep.distance and dep.producer in alike]
    found = {task}
    while new := {dep.producer for dep in deps if dep.consumer in found} - found:
        found |= new
    return found - {task}


def _ahead(plan: PipelinePlan, tasks: Sequence[str], group: str = "") -> PipelinePlan:
    """The tasks one iteration ahead of all that are in their stage or a later one."""
    stage = plan.schedule[tasks[-1]].stage
    later = {
        name: place.stage + 1
        for name, place in plan.schedule.items()
        if name not in tasks and place.stage >= stage
    }
    return _moved(plan, dict.fromkeys(tasks, group) if group else {}, later)


def _moved(
    plan: PipelinePlan, groups: Mapping[str, str], stages: Mapping[str, int]
) -> PipelinePlan:
    schedule = {
        name: replace(
            place,
            thread_group=groups.get(name, place.thread_group),
            stage=stages.get(name, place.stage),
        )
        for name, place in plan.schedule.items()
    }
    least = max(place.stage for place in schedule.values()) + 1
    depth = None if plan.pipeline_depth is None else max(plan.pipeline_depth, least)
    # What has moved has another place within a period, too.
    order = tuple(name for name in plan.order if schedule[name] == plan.schedule[name])
    return replace(plan, schedule=schedule, order=order, pipeline_depth=depth)


def _limit(limit: Limit) -> str:
    """What limits an interval, in short."""
    tasks = [task for task in limit.tasks if task != PULL]
    named = listed(tasks, _FEW)
    if limit.what:
        return f"{limit.what}, which is busy all the time ({named})" if tasks else limit.what
    if len(tasks) > 1:
        return f"{named}, which wait for each other from one iteration to the next"
    return f"{named} of the iteration before" if tasks else limit.text


def _in_one_stage(plan: PipelinePlan) -> PipelinePlan:
    """The plan's dependences, with all tasks on one thread, one after the other.

    Collectives stay ordered: what is advised may give them other threads.
    """
    return replace(
        plan,
        schedule={
            name: TaskSchedule(globally_ordered=entry.globally_ordered)
            for name, entry in plan.schedule.items()
        },
        same_period_deps=(),
        order=(),  # that of a pipeline may contradict the dependences within an iteration
        streams={},
        pipeline_depth=None,
    )


def _as_json(plan: PipelinePlan) -> str:
    """The plan as text; "" if it has streams that no file can hold."""
    try:
        return plan.to_json()
    except TypeError:
        return ""


def _new_group(plan: PipelinePlan, task: str) -> str:
    """A name for a thread group that the plan does not have."""
    taken = {*plan.thread_groups, DEFAULT_GROUP}
    return task if task not in taken else f"{task}_thread"
