"""Advice on what to change next: the plan that the planner finds, and the tasks to make faster.

The planner gets the loop as it was measured: the tasks' costs, the plan's dependences, and what the
tasks declare. The simulator runs the planner's plan over the sampled iterations. The prediction is
the measured time of an iteration, scaled by the ratio of the two simulated plans; the number of
cores limits it too. If batches differ, more iterations in flight even them out, so numbers up to
``MOST_AHEAD`` are tried too. Moving tasks cannot save more than their exposed times, so that is the
most that is promised. Nothing is promised if the interval of the saving contains 0. If the plan
declares no dependences between iterations, it is unknown which tasks may move, and none is moved.
An undeclared task is not moved away from the loop's body.

The saving of a task that takes half as long is simulated as well. A step is convex in the cost of a
task: half the cost saves at least half of the task's own part of its exposed time, and never more
than all of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from swpipe._distributed.shared_cores import cores, ranks_on_machine
from swpipe.analysis import verify
from swpipe.core.costs import CostModel
from swpipe.core.effects import (
    Declared,
    Effects,
    conflicts,
    with_the_others,
)
from swpipe.core.messages import counted, listed
from swpipe.core.plan import DEFAULT_GROUP, PULL, PipelinePlan, TaskSchedule
from swpipe.errors import PlanError
from swpipe.pipeline import SWPipeline
from swpipe.planning import Limits, auto_plan, simulate
from swpipe.planning.modulo.auto import shared_with_body
from swpipe.planning.simulation.interval import Limit
from swpipe.profiler.figures import Advice, Figures
from swpipe.profiler.spread import Estimate, short_ms
from swpipe.program import OWN

MOST = 3
"""The maximum number of changes that are advised."""

LEAST = 0.02
"""A saving below this fraction of an iteration is not promised, as it is not known that exactly."""

LEAST_SHARE = 0.1
"""Making a task shorter is not advised if less than this fraction of the reduction shortens the
step.
"""

ERROR = 0.1
"""The possible relative error of predicted iterations: the simulator does not model contention for
memory or for the interpreter lock.
"""

MORE = 1.1
"""A more complex plan must promise this many times the saving of a simpler one."""

EFFORT = 0.1
"""The planner's effort: a tenth of a second for 14 tasks, if the lower bound is not reached."""

MOST_AHEAD = 16
"""The maximum number of iterations in flight beyond those of the planner's plan."""

_FEW = 4  # the most tasks that are listed by name

_NO_DEPENDENCES = (
    "the plan declares no dependences between iterations; record the loop to find them"
)


def advise(result: Figures, pipe: SWPipeline[Any], loader: Effects) -> tuple[Advice, ...]:
    """Return the changes that promise most; another plan comes first, as it needs no new code.

    There are none if the plan is too large to be simulated.

    Args:
        result: The profile.
        pipe: The pipeline that was profiled. If iterations ran serially, its plan has the
            dependences.
        loader: The locations that the loader's calls may touch.
    """
    try:
        return tuple(_Advisor(result, pipe, loader).changes())[:MOST]
    except PlanError:
        return ()


class _Advisor:
    """A search for changes of a loop that was profiled.

    Attributes:
        plan: The plan that was measured.
        now_us: A simulated iteration under ``plan``; 0 if tasks take no time.
        declared: The declared effects of the tasks.
        effects: ``declared``, together with the loader and the loop's body. An undeclared loader
            is treated as apart, and advice about it states that condition.
        why_not: The reason why no other plan is advised; "" if one is.

    Raises:
        PlanError: The plan is too large.
    """

    def __init__(self, result: Figures, pipe: SWPipeline[Any], loader: Effects) -> None:
        self._result = result
        self._costs = result.costs
        self._cpu_s = sum(task.thread.cpu_s for task in result.tasks.values())
        self._streams = pipe.device.has_streams
        self._loader = loader
        self.plan = pipe.plan if result.mode == "pipelined" else _in_one_stage(pipe.plan)
        self.now_us, _ = self._predict(self.plan)
        declared = Declared.by(pipe.tasks)
        self.declared = declared.effects
        self.effects = with_the_others(self.declared, declared.undeclared, apart=True, body=True)
        self.why_not = ""

    def changes(self) -> Iterator[Advice]:
        """Yield another plan, then changes of the loader, then the tasks to make faster."""
        result = self._result
        named = set[str]()
        best = self._best_plan()
        if best is not None and best.plan is not None:
            named = {best.task, *_moved(self.plan, best.plan)}
            yield best
        for advice in sorted(self._of_loader(), key=lambda advice: -advice.saved_s):
            named.add(advice.task)
            yield advice
        # Tasks that the plan moves are skipped: their exposed times hold for the present plan only.
        halves = {task: self._half(task) for task in result.own_s if task not in named}
        stay = self._with_the_body()
        for task, saved in sorted(halves.items(), key=lambda item: -item[1].value_s):
            if saved.value_s:
                words = f"make {'the loader' if task == PULL else task} take half as long"
                yield Advice(words, task, saved, not_moved=stay.get(task, self.why_not))

    def _half(self, task: str) -> Estimate:
        """Return how much shorter an iteration is if a task takes half as long; 0 if unknown."""
        result = self._result
        own_s = result.own_s[task]
        exposed = result.exposed(task)
        least_s = max(LEAST * result.baseline_s, LEAST_SHARE * result.host_s[task] / 2)
        # Only the certain saving counts here, which is half of what the task's removal saves.
        if exposed is None or own_s <= max(exposed.spread_s, 2 * least_s):
            return Estimate(0.0, 0.0)
        costs = self._costs.with_scaled({task: 0.5})
        cpu_s = self._cpu_s - result.tasks[task].thread.cpu_s / 2
        then_us, _ = self._predict(self.plan, costs, cpu_s)
        # The simulated saving is limited to the range that convexity guarantees.
        then_s = self._at_least(then_us)
        saved_s = min(own_s, max(own_s / 2, result.baseline_s - then_s))
        guessed_s = ERROR * (saved_s - own_s / 2)  # only half of the saving is certain
        return Estimate(saved_s, exposed.spread_s * saved_s / own_s + guessed_s)

    def _at_least(self, then_us: float) -> float:
        """Return a simulated iteration in seconds, limited by the loader's pace.

        The measured iteration is scaled by the ratio of the simulated iterations.
        """
        then_s = self._result.baseline_s * then_us / self.now_us if self.now_us else 0.0
        pace = self._result.pace
        # No plan is faster than a loader that works ahead, and the start of a pass is never hidden.
        return max(then_s, (pace.rate_s if pace.works_ahead else 0.0) + pace.start_s)

    def _of_loader(self) -> Iterator[Advice]:
        """Yield changes of a loader that is too slow, or whose passes begin slowly."""
        result = self._result
        pace = result.pace
        waits = result.exposed(PULL)
        if waits is None:
            return
        least_s = LEAST * result.baseline_s
        if result.limited_by_loader and (saved_s := waits.value_s - pace.start_s) > least_s:
            rest_s = result.baseline_s - waits.value_s
            words = f"make a batch in {short_ms(rest_s)} ms instead of {short_ms(pace.rate_s)}"
            if pace.workers:
                # The loader only needs to be as fast as the rest of the step.
                more = math.ceil(pace.workers * pace.rate_s / max(rest_s, least_s))
                words += f": {more} workers instead of {pace.workers}, or less work for each batch"
                if more > cores():
                    words += f" ({counted(cores(), 'core')} here)"
            saved = Estimate(saved_s, waits.spread_s)
            yield Advice(words, PULL, saved, limit="the rest of the step")
        # The start of a pass counts even if the loader is fast enough otherwise.
        if pace.start_s > least_s:
            words = "make the start of a pass of the loader take less time"
            if pace.starts_workers:
                words = "keep the loader's workers: DataLoader(persistent_workers=True)"
            yield Advice(words, PULL, Estimate(pace.start_s, ERROR * pace.start_s))

    # ------------------------------------------------------------------------------ other plans

    def _best_plan(self) -> Advice | None:
        """Return the advice of the best plan; None if no plan saves time."""
        result = self._result
        plan = self.plan
        best = None
        least_s = LEAST * result.baseline_s
        for other in self._others() if self.now_us else ():
            moved = _moved(plan, other)
            then_us, limit = self._predict(other)
            # A plan that only adds iterations in flight moves no task; then the tasks on worker
            # threads bound what it can save.
            beside = [n for n, e in other.schedule.items() if e.thread_group != DEFAULT_GROUP]
            promise = self._promise(moved or beside, then_us)
            # The saving must exceed its interval, and a plan that comes later, which is less
            # simple, must exceed the best so far by the factor ``MORE``.
            if promise.value_s > max(promise.spread_s, least_s):
                if best is None or promise.value_s > MORE * best.saved_s:
                    words = _words(moved, other, plan)
                    if PULL in moved and self._loader.undeclared:
                        words += ", if it uses nothing that the loop changes"
                    task = max(moved, key=lambda name: result.exposed_s.get(name, 0.0), default="")
                    best = Advice(words, task, promise, limit=limit, plan=replace(other, tasks=()))
            elif promise.value_s > least_s:
                self.why_not = f"another plan might save {promise.exact} ms, and may save nothing"
            else:
                self.why_not = f"iterations would be limited by {limit}"
        # If another plan is advised, the reasons that held for rejected plans are obsolete.
        if best is not None:
            self.why_not = ""
        elif not plan.cross_iter_deps:
            self.why_not = _NO_DEPENDENCES
        return best

    def _with_the_body(self) -> dict[str, str]:
        """Return the reasons why tasks stay with the loop's body."""
        why_not = {}
        for name, places in shared_with_body(conflicts(self.effects)).items():
            states = listed(sorted(map(str, places)))
            why_not[name] = (
                f"{name!r} uses {states}, which the loop's body may use as well: if it does not, "
                'declare the state by DeclaredIO(others="")'
            )
            if self.declared[name].undeclared:
                why_not[name] = (
                    f"{name!r} does not declare what it uses, and the loop's body may change that: "
                    "give the task pure=True, or its states by io=[DeclaredIO(state=...)]"
                )
        return why_not

    def _others(self) -> Iterator[PipelinePlan]:
        """Yield plans to compare with the measured one, the simplest first."""
        # Only with costs of each iteration can the simulator see that more iterations in flight
        # help.
        powers = MOST_AHEAD.bit_length() if self._costs.iterations else 0
        ahead = [2**power for power in range(powers)]
        # They are simpler than other threads, and come first.
        if self.plan.max_stage or self.plan.pull_group is not None:
            yield from (_deeper(self.plan, more) for more in ahead)
        plans = [*self._overlapping()]
        yield from plans
        for more in ahead:
            yield from (_deeper(plan, more) for plan in plans)

    def _overlapping(self) -> Iterator[PipelinePlan]:
        """Yield plans with as many iterations in flight as the mean costs need."""
        plan = self.plan
        # Calling the loader on a thread of its own is the simplest change: it needs no dependences.
        if PULL in self._costs.tasks and plan.pull_group is None:
            group = "loader" if "loader" not in plan.thread_groups else "loader_thread"
            yield replace(_deeper(plan, 1), pull_group=group)
        if not plan.cross_iter_deps:
            return
        groups = max(2, min(4, cores()), len(plan.thread_groups))
        may_have = {name: task.most_workers for name, task in self._result.tasks.items()}
        stay: Sequence[str] = ()
        # Plans with one worker per task come first, as they are simpler.
        for workers in sorted({1, *may_have.values()}):
            limits = Limits(groups=groups, workers=workers, frozen=stay)
            try:
                best = auto_plan(
                    plan,
                    self._costs,
                    limits=limits,
                    streams=self._streams,
                    effects=self.effects,
                    effort=EFFORT,
                ).plan
            except PlanError as error:
                self.why_not = error.problems[0].text
                return
            if workers == 1:
                best = self._least_moved(best)
                # Tasks that the caller's thread runs in the last stage keep a single worker, since
                # the caller has no other threads. Tasks of earlier stages on that thread are
                # not frozen: pairs in same_period_deps keep their distance, which tasks of one
                # stage may not have.
                stay = [
                    name
                    for name, entry in best.schedule.items()
                    if (entry.thread_group, entry.stage) == (DEFAULT_GROUP, best.max_stage)
                ]
            if all(e.workers <= may_have.get(name, 1) for name, e in best.schedule.items()):
                yield best

    def _least_moved(self, best: PipelinePlan) -> PipelinePlan:
        """Return the plan with the caller's group renamed if fewer tasks move that way.

        The result must be as fast.
        """
        most_us = (1 + LEAST) * self._predict(best)[0]
        least = best
        # Groups are interchangeable for the planner. Swapping one with the caller's thread gives
        # the same schedule, but may leave more tasks where they are.
        for group in best.thread_groups:
            swap = {group: DEFAULT_GROUP, DEFAULT_GROUP: group}
            schedule = {
                name: replace(entry, thread_group=swap.get(entry.thread_group, entry.thread_group))
                for name, entry in best.schedule.items()
            }
            other = replace(best, schedule=schedule)
            if len(_moved(self.plan, other)) < len(_moved(self.plan, least)):
                with suppress(PlanError):  # undeclared tasks stay with the loop's body
                    verify(other, effects=self.effects, streams=self._streams)
                    least = other if self._predict(other)[0] <= most_us else least
        return least

    def _promise(self, moved: Sequence[str], then_us: float) -> Estimate:
        """Return the saving of a plan whose simulated iteration takes ``then_us``."""
        result = self._result
        each = [exposed for name in moved if (exposed := result.exposed(name)) is not None]
        # Together the moved tasks save at most the sum of their exposed times. This is exact if no
        # task hides another.
        most_s = sum(max(0.0, exposed.value_s) for exposed in each)
        error_s = max(result.step.spread_s, math.hypot(*(of.spread_s for of in each)))
        then_s = self._at_least(then_us)
        return Estimate(min(result.baseline_s - then_s, most_s), error_s + ERROR * then_s)

    def _predict(
        self, plan: PipelinePlan, costs: CostModel | None = None, cpu_s: float | None = None
    ) -> tuple[float, str]:
        """Return the microseconds of a simulated iteration, and a short description of its limit.

        Raises:
            PlanError: The plan cannot run, or is too large.
        """
        simulated = simulate(plan, costs or self._costs, streams=self._streams)
        cpu_s = self._cpu_s if cpu_s is None else cpu_s
        # The simulator knows threads but no cores: all ranks on the machine share them.
        cores_us = 1e6 * ranks_on_machine() * cpu_s / cores()
        if cores_us > simulated.ii_us:
            return cores_us, f"the {counted(cores(), 'core')}"
        return simulated.ii_us, _limit(simulated.limits)


def _limit(limit: Limit) -> str:
    """Return a short description of the limit that does not name every task and iteration."""
    # The engine's own actions mean nothing to the user.
    tasks = [task for task in limit.tasks if task not in OWN]
    named = listed(tasks, _FEW)
    if limit.what:
        return f"{limit.what}, which is busy all the time ({named})" if tasks else limit.what
    if len(tasks) > 1:
        return f"{named}, which wait for each other from one iteration to the next"
    return f"{named} of the iteration before" if tasks else limit.text


# -------------------------------------------------------------------------------------- plans


def _deeper(plan: PipelinePlan, more: int) -> PipelinePlan:
    """Return a plan with so many more iterations in flight."""
    return replace(plan, pipeline_depth=plan.depth + more)


def _in_one_stage(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with its dependences, but all tasks and the pull on one thread.

    Collectives stay globally ordered, since advised plans may run them on other threads.
    """
    return replace(
        plan,
        schedule={
            name: TaskSchedule(globally_ordered=entry.globally_ordered)
            for name, entry in plan.schedule.items()
        },
        same_period_deps=(),
        order=(),  # a pipeline's order may contradict the dependences within an iteration
        streams={},
        pipeline_depth=None,
        pull_group=None,
    )


def _ahead(plan: PipelinePlan, name: str) -> int:
    """Return how many iterations a task runs ahead of the last stage."""
    return plan.max_stage - plan.schedule[name].stage


def _moved(plan: PipelinePlan, best: PipelinePlan) -> list[str]:
    """Return the tasks whose thread, number of workers or lookahead differs."""
    moved = [
        name
        for name, entry in best.schedule.items()
        if entry.thread_group != plan.schedule[name].thread_group
        or entry.workers != plan.schedule[name].workers
        or _ahead(best, name) != _ahead(plan, name)
    ]
    return [PULL, *moved] if best.pull_group != plan.pull_group else moved


def _words(moved: Sequence[str], best: PipelinePlan, plan: PipelinePlan) -> str:
    """Return the advice in words: which tasks to run on which thread, and how far ahead."""
    known = {*plan.thread_groups, DEFAULT_GROUP}
    places: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name in moved:
        if name != PULL:
            places[best.schedule[name].thread_group, _ahead(best, name)].append(name)
    clauses = ["call the loader on a thread of its own"] if PULL in moved else []
    for (group, ahead), names in places.items():
        workers = best.schedule[names[0]].workers
        its = "its" if len(names) == 1 else "their"
        where = f"thread {group!r}"
        if workers > 1:
            where = f"{workers} threads of {its} own"
        elif group not in known:
            where = f"a thread of {its} own"
        count = "one iteration" if ahead == 1 else f"{ahead} iterations"
        early = f", {count} ahead" if ahead else ""
        clauses.append(f"run {listed(names, _FEW)} on {where}{early}")
    if best.depth > best.least_depth:
        clauses.append(f"have up to {best.depth} iterations in flight")
    return "; ".join(clauses)
