"""Choose a plan for a loop: record, measure, plan, verify, try; and say why.

On several ranks all of them do the same steps, and then use what all of them found::

    record     a task touches what it touches on any rank: the tables, say, differ between ranks
    measure    a task costs its mean over the ranks. The rank that enters a collective first waits
               there for the others: the maximum would count that wait on top of its cause
    plan       each rank plans, and all use rank 0's plan
    try        a round takes as long as on the slowest rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from swpipe._distributed.rank_checks import gather
from swpipe.analysis.races import race_problems
from swpipe.core.context import TypedContext
from swpipe.core.costs import CostModel
from swpipe.core.messages import counted, in_ms
from swpipe.core.plan import PipelinePlan, StreamRef
from swpipe.core.resolved import resolve_plan
from swpipe.core.task import PipelineTask
from swpipe.device import Device, resolve
from swpipe.inference import Recording, record
from swpipe.pipeline import SWPipeline
from swpipe.planning.limits import Limits
from swpipe.planning.modulo.auto import Choice, auto_plan, with_undeclared
from swpipe.planning.simulation.simulator import simulate
from swpipe.profiler import measure_costs, try_plans

SERIAL = "serial"
PLANNED = "planned"
PLANNED_AGAIN = "planned from costs under the plan"

EFFORT = 5.0
"""Planning takes about a second, little beside recording and measuring."""

_BATCHES = 3  # that costs are measured on
_ROUNDS = 5  # of the trial
_TRUSTED = 0.1  # relative error of a prediction that is still trusted
_LOCKED = 0.9  # part of the interval for which the interpreter lock is held, where it limits
_SAME = 0.01  # relative difference of two predictions that counts as none


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that is tried. All times are microseconds per iteration.

    Attributes:
        name: ``serial``, the name of a ready-made plan, or how the plan was made.
        plan: The plan.
        predicted_us: What the simulator predicts.
        why: Sentences about the plan.
        rounds_us: What was measured, a figure per round. All candidates run in each round.
    """

    name: str
    plan: PipelinePlan
    predicted_us: float
    why: tuple[str, ...] = ()
    rounds_us: tuple[float, ...] = ()

    @property
    def interval_us(self) -> float:
        """The median over the rounds."""
        return median(self.rounds_us)

    @property
    def spread_us(self) -> float:
        """Half the range over the rounds."""
        return (max(self.rounds_us) - min(self.rounds_us)) / 2


@dataclass(frozen=True, slots=True)
class Tuned:
    """A plan, chosen by trial.

    Attributes:
        chosen: The candidate that was chosen.
        candidates: All that were tried, the simplest first: serial, ready-made, planned.
        why: The reasons, a sentence each.
        recording: What the tasks touch.
        costs: What the tasks cost.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    why: tuple[str, ...]
    recording: Recording
    costs: CostModel

    @property
    def plan(self) -> PipelinePlan:
        """The chosen plan."""
        return self.chosen.plan

    def format(self) -> str:
        """A head line, the reasons, and a table of all candidates."""
        from tabulate import tabulate

        rows = []
        for each in self.candidates:
            times = map(in_ms, (each.interval_us, each.spread_us, each.predicted_us))
            rows.append((each.name, *times, each.plan.depth, len(each.plan.thread_groups)))
        table = tabulate(
            rows,
            headers=("plan", "per iteration", "spread", "predicted", "in flight", "threads"),
            disable_numparse=True,
            colalign=("left", *["right"] * 5),
        )
        head = (
            f"{in_ms(self.chosen.interval_us)} per iteration, "
            f"{counted(self.plan.depth, 'iteration')} in flight, "
            f"{counted(len(self.plan.thread_groups), 'thread')}: {self.chosen.name}"
        )
        return "\n".join((head, *(f"  {sentence}" for sentence in self.why), table))


@dataclass(frozen=True, slots=True)
class Loop:
    """Tasks with batches to run them on; the fields are those arguments of ``autotune``."""

    tasks: Sequence[PipelineTask]
    batches: Sequence[Any]
    device: Device | torch.device | str | None = None
    streams: Mapping[str, StreamRef] = field(default_factory=dict)
    ordered: frozenset[str] = frozenset()
    over_ranks: Callable[[Any], list[Any]] | None = None
    progress: Callable[[str], object] = lambda line: None
    context: type[TypedContext] | None = None
    loader: Iterable[Any] | None = None

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("batches is empty: give at least one batch")

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        if self.over_ranks is not None:
            return self.over_ranks(value)
        return gather(value) if dist.is_available() and dist.is_initialized() else [value]

    @property
    def has_streams(self) -> bool:
        """Whether the device has streams."""
        return resolve(self.device).has_streams

    def record(self) -> Recording:
        """Record two serial iterations: what the tasks touch, on any rank."""
        self.progress("recording what the tasks touch")
        batch, device, context = self.batches[0], self.device, self.context
        own = record(self.tasks, batch, device=device, context=context, loader=self.loader)
        return own.together(self.gather(replace(own, tasks=())))

    def measure(self, plan: PipelinePlan) -> CostModel:
        """Measure what the tasks cost while ``plan`` runs."""
        self.progress("measuring what the tasks cost")
        with SWPipeline(
            plan, self.tasks, device=self.device, context=self.context, check_effects=False
        ) as pipe:
            own = measure_costs(
                pipe, self.batches[:_BATCHES], pipelined=plan.depth > 1, loader=self.loader
            )
        return CostModel.mean(self.gather(own))

    def inferred_plan(self, recording: Recording) -> PipelinePlan:
        """The recorded dependences, with the loop's streams and globally ordered tasks.

        It has names instead of tasks, so that it can be sent to other ranks.
        """
        plan = recording.plan()
        schedule = {
            task: replace(
                entry,
                stream=self.streams.get(task),
                globally_ordered=entry.globally_ordered or task in self.ordered,
            )
            for task, entry in plan.schedule.items()
        }
        return replace(plan, schedule=schedule, tasks=())


def autotune(
    tasks: Iterable[PipelineTask],
    batches: Iterable[Any],
    *,
    device: Device | torch.device | str | None = None,
    context: type[TypedContext] | None = None,
    limits: Limits | None = None,
    ready_made: Mapping[str, PipelinePlan] | None = None,
    streams: Mapping[str, StreamRef] | None = None,
    ordered: Iterable[str] = (),
    over_ranks: Callable[[Any], list[Any]] | None = None,
    progress: Callable[[str], object] = lambda line: None,
    loader: Iterable[Any] | None = None,
) -> Tuned:
    """Choose a plan for a loop, by trial, and say why.

    The serial plan, the ready-made plans and up to two planned ones run side by side. The simplest
    plan (serial, then ready-made, then planned) is chosen, unless another is faster by more than
    the trial's spread. The state of the tasks is put back after each step.

    Args:
        tasks: In serial order.
        batches: At least one; three or more show how batches differ.
        device: As for ``SWPipeline``.
        context: As for ``SWPipeline``.
        limits: None for ``Limits()``.
        ready_made: Name to plan. A plan that breaks the limits, or that could give other numbers
            than the serial loop, is left out.
        streams: Task name to the stream of its device work; others use the caller's stream.
        ordered: Names of tasks that communicate, in addition to those that are recognised.
        over_ranks: Takes this rank's value and returns those of all ranks; a collective. None for
            torch.distributed's default group, where there is one.
        progress: Called with one line before each step.
        loader: What training takes its batches from, such as a ``DataLoader``. Its calls are
            measured and planned too, and each trial makes them. They come after the iteration
            before, if nothing is known of what the loader uses. Otherwise (a list, or a DataLoader
            with workers) a thread of their own may make them, if that is faster.

    Raises:
        ValueError: There are no batches.
        PlanError: The limits admit no plan, or a task is unknown.
        BaseException: Whatever a task raised.
    """
    limits = limits or Limits()
    loop = Loop(
        tuple(tasks),
        list(batches),
        device,
        streams or {},
        frozenset(ordered),
        over_ranks,
        progress,
        context,
        loader,
    )
    recording = loop.record()
    inferred = loop.inferred_plan(recording)
    alone = costs = loop.measure(inferred)
    planned = [_planned(PLANNED, loop, inferred, recording, costs, limits)]
    if planned[0].plan.depth > 1:  # tasks that run side by side slow each other: measure that
        costs = loop.measure(planned[0].plan)
        planned.append(_planned(PLANNED_AGAIN, loop, inferred, recording, costs, limits))
    simple, left_out = _simple(loop, recording, costs, limits, ready_made or {})
    candidates = _try(loop, (*simple, *planned))
    chosen = choose(candidates)
    _, undeclared = with_undeclared(limits, recording.effects)
    why = dict.fromkeys((*explain(candidates, chosen, alone), *undeclared, *left_out))
    return Tuned(chosen, candidates, tuple(why), recording, costs)


# ------------------------------------------------------------------------------------ candidates


def _planned(
    name: str,
    loop: Loop,
    inferred: PipelinePlan,
    recording: Recording,
    costs: CostModel,
    limits: Limits,
) -> Candidate:
    """The planner's plan; on several ranks that of rank 0."""
    streams = loop.has_streams
    choice: Choice = auto_plan(
        inferred, costs, limits=limits, streams=streams, effects=recording.effects, effort=EFFORT
    )

    keeps_order = partial(_keeps_order, loop, recording)
    plan, why = join_stages(choice.plan, costs, keeps_order, streams=streams)
    if len(plan.thread_groups) > 1 and plan.depth < limits.in_flight:
        plan = replace(plan, pipeline_depth=plan.depth + 1)
        why = (*why, "One more iteration in flight evens out batches that take longer.")
    own = Candidate(name, plan, _predicted(plan, costs, streams), why=(*choice.why, *why))
    first: Candidate = loop.gather(own)[0]
    return first


def join_stages(
    plan: PipelinePlan,
    costs: CostModel,
    allowed: Callable[[PipelinePlan], bool],
    *,
    streams: bool,
) -> tuple[PipelinePlan, tuple[str, ...]]:
    """Put tasks of one stage into one thread group, where parting them gains nothing.

    Returns:
        The plan, ``allowed`` and predicted to be as fast, and a sentence for each joined stage.
    """
    most_us = _predicted(plan, costs, streams) * (1 + _SAME)
    why: list[str] = []
    for stage in sorted({entry.stage for entry in plan.schedule.values()}):
        groups = {e.thread_group for e in plan.schedule.values() if e.stage == stage}
        for group in sorted(groups, key=lambda name: (name != "default", name)):
            joined = replace(
                plan,
                schedule={
                    task: replace(e, thread_group=group) if e.stage == stage else e
                    for task, e in plan.schedule.items()
                },
            )
            as_fast = joined != plan and _predicted(joined, costs, streams) <= most_us
            if as_fast and allowed(joined):
                plan = joined
                why.append(
                    f"The tasks of stage {stage} share thread group {group}: parting them gains "
                    "nothing."
                )
                break
    return plan, tuple(why)


def _simple(
    loop: Loop,
    recording: Recording,
    costs: CostModel,
    limits: Limits,
    ready_made: Mapping[str, PipelinePlan],
) -> tuple[list[Candidate], list[str]]:
    """The serial plan, then the ready-made ones; and why some of these are left out."""
    plans = {SERIAL: replace(PipelinePlan.serial(loop.tasks), tasks=()), **ready_made}
    kept, left_out = [], []
    for name, plan in plans.items():
        reason = ""
        if name == SERIAL:
            pass
        elif plan.depth > limits.in_flight or len(plan.thread_groups) > limits.threads:
            reason = "it is above the limits"
        elif limits.frozen:
            reason = "the limits freeze tasks"
        elif not _keeps_order(loop, recording, plan):
            reason = "it could give other numbers than the serial loop"
        if reason:
            left_out.append(f"The ready-made plan {name} was not tried: {reason}.")
        else:
            kept.append(Candidate(name, plan, _predicted(plan, costs, loop.has_streams)))
    return kept, left_out


def _keeps_order(loop: Loop, recording: Recording, plan: PipelinePlan) -> bool:
    return not race_problems(resolve_plan(plan), recording.effects, streams=loop.has_streams)


def _predicted(plan: PipelinePlan, costs: CostModel, streams: bool) -> float:
    return simulate(plan, costs, streams=streams).ii_us


# ----------------------------------------------------------------------------------------- trial


def _try(loop: Loop, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Run all candidates in each round, in an order that alternates."""
    loop.progress(f"trying {', '.join(candidate.name for candidate in candidates)}")
    plans = {candidate.name: candidate.plan for candidate in candidates}
    rounds_us: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(_ROUNDS):
        own_s = try_plans(
            loop.tasks,
            plans if turn % 2 else dict(reversed(plans.items())),
            [loop.batches[turn % len(loop.batches)]],
            device=loop.device,
            context=loop.context,
            loader=loop.loader,
        )
        all_s = loop.gather(own_s)
        for name, rounds in rounds_us.items():
            rounds.append(1e6 * max(rank_s[name] for rank_s in all_s))
    return tuple(
        replace(candidate, rounds_us=tuple(rounds_us[candidate.name])) for candidate in candidates
    )


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The first candidate, the simplest first, that none beats by more than the two's spread."""
    best = min(candidates, key=lambda each: each.interval_us)
    return next(
        each
        for each in candidates
        if each.interval_us - best.interval_us <= max(each.spread_us, best.spread_us)
    )


def explain(
    candidates: Sequence[Candidate], chosen: Candidate, alone: CostModel
) -> tuple[str, ...]:
    """Why a candidate was chosen, what limits it, and whether its prediction is to be trusted.

    ``alone`` has costs measured one task at a time: only these have the times of the lock.
    """
    best, serial = min(candidates, key=lambda each: each.interval_us), candidates[0]
    took_us, why = chosen.interval_us, list(chosen.why)
    if chosen is serial:
        why.append("No plan is faster than the serial one by more than the spread of the trial.")
    else:
        gain = 1 - took_us / serial.interval_us
        why.append(f"It takes {gain:.1%} less time per iteration than the serial plan.")
        if chosen is not best:
            why.append(f"{best.name} is not faster by more than the spread, and less simple.")
    if abs(chosen.predicted_us - took_us) > max(chosen.spread_us, _TRUSTED * took_us):
        why.append(
            f"Do not trust the prediction: {in_ms(chosen.predicted_us)} predicted, "
            f"{in_ms(took_us)} measured."
        )
    locked_us = {name: cost.gil_us for name, cost in alone.tasks.items()}
    held_us = sum(locked_us.values())
    if held_us > _LOCKED * took_us:
        most = max(locked_us, key=lambda name: locked_us[name])
        why.append(
            f"The interpreter lock limits the interval: tasks hold it for {in_ms(held_us)}, {most} "
            "the longest, and threads cannot share it; use processes (DataLoader workers)."
        )
    return tuple(why)
