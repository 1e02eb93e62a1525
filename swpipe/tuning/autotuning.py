"""The tuning of a loop: record, measure, plan, verify and try plans; choose one, and say why.

On several ranks, all ranks do the same steps and use the findings of all of them::

    record     a task touches what it touches on any rank: for example, ranks have different tables
    measure    a task costs its mean over the ranks. The rank that enters a collective first waits
               there for the other ranks: the maximum would count that wait on top of its cause
    plan       each rank plans, and all use rank 0's plan
    try        a round takes as long as on the slowest rank
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from swpipe._distributed.rank_checks import gather
from swpipe._distributed.shared_cores import cores
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.races import race_problems
from swpipe.analysis.validation import validate
from swpipe.core.context import TypedContext
from swpipe.core.costs import CostModel
from swpipe.core.effects import EffectTable, with_the_others
from swpipe.core.loaders import is_apart
from swpipe.core.messages import counted, in_ms
from swpipe.core.plan import BODY, PipelinePlan, TaskSchedule
from swpipe.core.records import first_lines
from swpipe.core.tables import table
from swpipe.core.task import PipelineTask
from swpipe.core.task_memory import TaskMemory
from swpipe.device import Device, resolve
from swpipe.inference import Recording, record
from swpipe.pipeline import SWPipeline, borrowed
from swpipe.planning.limits import Limits
from swpipe.planning.modulo.auto import auto_plan, beside_the_others
from swpipe.planning.ranks import Ranks
from swpipe.planning.simulation.simulator import peak_of, simulate
from swpipe.profiler import measure_costs, measure_memory
from swpipe.profiler.measure import Pulls, WindowTimer
from swpipe.profiler.memory_use import ITERATIONS as MEMORY_ITERATIONS
from swpipe.profiler.other_load import OtherLoad, disturbance, load_so_far
from swpipe.profiler.sampling import MOST, Sample
from swpipe.profiler.trial import trial_state
from swpipe.tuning.budget import Budget, Window
from swpipe.tuning.rank_waits import on_ranks
from swpipe.tuning.tried_plans import Candidate, choose, explain

SERIAL = "serial"
PLANNED = "planned"
PLANNED_AGAIN = "planned from costs under the plan"

EFFORT = 5.0
"""The planner's effort: planning takes about a second, much less than recording and measuring."""

_RECORDED = 2  # iterations of a recording, which are slower than others
_WINDOWS = 3  # windows in which costs are measured; two more on a device
_ROUNDS = 5  # rounds of the trial
_LEAST_ROUNDS = 2
# Fractions of the time limit: by which costs are measured, first alone, then under a plan.
_MEASURED_BY = 0.3
_AGAIN_BY = 0.5
_SAME = 0.01  # relative difference of two predictions that counts as none


@dataclass(frozen=True, slots=True)
class Tuned:
    """A plan that was chosen by trial.

    Attributes:
        chosen: The candidate that was chosen.
        candidates: All candidates, the simplest first: serial, ready-made, planned.
        why: The reasons, a sentence each.
        recording: The effects of the tasks.
        costs: The costs of the tasks, and the memory that they hold.
        other_load: The load of other processes during tuning; None if it is not known.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    why: tuple[str, ...]
    recording: Recording
    costs: CostModel
    other_load: OtherLoad | None = None

    @property
    def plan(self) -> PipelinePlan:
        """The chosen plan."""
        return self.chosen.plan

    def format(self) -> str:
        """Return the choice as text: load, head line, reasons, and a table of all candidates."""
        rows = []
        for each in self.candidates:
            times = map(in_ms, (each.interval_us, each.spread_us, each.predicted_us))
            rows.append((each.name, *times, each.plan.depth, each.plan.threads))
        titles = ("plan", "per iteration", "spread", "predicted", "in flight", "threads")
        head = (
            f"{in_ms(self.chosen.interval_us)} per iteration, "
            f"{counted(self.plan.depth, 'iteration')} in flight, "
            f"{counted(self.plan.threads, 'thread')}: {self.chosen.name}"
        )
        why = (f"  {sentence}" for sentence in self.why)
        lines = (disturbance(self.other_load), head, *why, table(titles, rows))
        return "\n".join(filter(None, lines))

    def __str__(self) -> str:
        return self.format()

    def __repr__(self) -> str:
        return first_lines(self, self.format())


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop to be tuned or reported on: tasks, batches to run them on, and facts about both.

    Attributes:
        tasks: The tasks in serial order.
        batches: The batches of the loop; a ``Sample`` of them is measured.
        device: See ``SWPipeline``.
        like: A plan from which tasks take their streams and their global order.
        progress: Called with one line before each step.
        context: See ``SWPipeline``.
        loader: The source of the batches of training; None if a batch costs nothing.
        pulls: The calls of ``loader``, whose pace is measured once.
        budget: The time for measurements.
        memory: The memory of the tasks; measured costs have it, too.
        apart: Whether the source of the batches is known to be apart from the loop.
        ranks: The ranks to plan for; None for the existing ones.
        state: The state that trials restore; None for what is declared and shown.
    """

    tasks: Sequence[PipelineTask]
    batches: Any
    device: Device | torch.device | str | None = None
    like: PipelinePlan | None = None
    progress: Callable[[str], object] = lambda line: None
    context: type[TypedContext] | None = None
    loader: Iterable[Any] | None = None
    pulls: Pulls = field(init=False)
    budget: Budget = field(default_factory=Budget)
    memory: TaskMemory | None = None
    apart: bool = True
    ranks: Ranks | None = None
    state: Any = None

    def __post_init__(self) -> None:
        # A frozen dataclass allows this assignment only through ``object``.
        object.__setattr__(self, "batches", Sample.of(self.batches))
        object.__setattr__(self, "pulls", Pulls(self.loader))

    def agreed(self) -> Loop:
        """Return the loop with the same number of batches on all ranks."""
        return replace(self, batches=Sample.of(self.batches, min(gather(len(self.batches)))))

    @property
    def has_streams(self) -> bool:
        """Whether the device has streams."""
        return resolve(self.device).has_streams

    def opened(self, plan: PipelinePlan) -> SWPipeline[Any]:
        """Return a pipeline of the tasks under a plan, which does not check their effects."""
        return SWPipeline(
            plan, self.tasks, device=self.device, context=self.context, check_effects=False
        )

    def predicted_us(self, plan: PipelinePlan, costs: CostModel) -> float:
        """Return the interval of a plan that the simulator predicts."""
        return simulate(plan, costs, streams=self.has_streams).ii_us

    def admits(self, plan: PipelinePlan, costs: CostModel, max_bytes: int | None) -> bool:
        """Return whether a plan holds at most ``max_bytes``."""
        # Without a limit, or if memory was not measured, any plan is admitted.
        if max_bytes is None:
            return True
        held = peak_of(plan, costs, streams=self.has_streams)
        return held is None or held.bytes <= max_bytes

    def record(self) -> Recording:
        """Record two serial iterations: what the tasks touch, on any rank."""
        self.progress("recording what the tasks touch")
        with self.budget.spending(_RECORDED):
            own = record(
                self.tasks,
                self.batches[0],
                device=self.device,
                context=self.context,
                loader=self.loader,
            )
        # A loader that was not recorded is assumed to touch what the loop's body touches, unless it
        # is apart.
        effects = with_the_others(own.effects, own.effects[BODY], apart=self.apart, body=True)
        own = replace(own, effects=effects)
        # Tasks are functions, which cannot be sent to other ranks; names suffice.
        return own.together(gather(replace(own, tasks=())))

    def measure(self, plan: PipelinePlan, until: float = 1.0) -> CostModel:
        """Measure the tasks' costs while ``plan`` runs, by a fraction of the time limit."""
        budget = self.budget
        self.progress("measuring what the tasks cost")
        windows = _WINDOWS + 2 * self.has_streams
        window = budget.window(windows, until, self.through())
        batches = Sample.of(self.batches, self._cycle(window))
        with self.opened(plan) as pipe, budget.spending(windows * window.iterations):
            own = measure_costs(
                pipe,
                batches,
                *window,
                pipelined=plan.depth > 1,
                state=self.state,
                loader=self.pulls,
            )
        # The mean over ranks, for the reason given in the module's docstring.
        mean = CostModel.mean(gather(own))
        return replace(mean, memory=self.memory)

    def measure_memory(
        self, keep: Sequence[str] | None = None, effects: EffectTable | None = None
    ) -> TaskMemory:
        """Measure what the tasks hold on the first batch, and return that of the rank holding most.

        ``keep`` is that of the plan. ``effects`` are used for tasks that do not declare what they
        use.
        """
        self.progress("measuring what the tasks hold")
        with self.budget.spending(MEMORY_ITERATIONS):
            own = measure_memory(
                self.tasks,
                self.batches[:1],
                device=self.device,
                context=self.context,
                state=self.state,
                keep=keep,
                effects=effects,
            )
        names = [task.name for task in self.tasks]
        # A single plan serves all ranks, so the rank with the largest peak decides.
        return max(gather(own), key=lambda memory: memory.serial_peak(names))

    def try_round(
        self, plans: Mapping[str, PipelinePlan], turn: int, window: Window
    ) -> dict[str, float]:
        """Run plans alternately, and return the seconds of each on the slowest rank.

        The order of plans alternates from turn to turn, so that a machine whose speed drifts
        favours none of them. In a turn, all plans go through the same successive batches, which
        differ from turn to turn. All state is restored.
        """
        ordered = dict(reversed([*plans.items()])) if turn % 2 else plans
        batches = self.batches.section(turn, self._cycle(window))
        # A step ends on all ranks together, so the slowest rank sets its time.
        all_s = gather(self._time(ordered, batches, window))
        return {name: max(rank_s[name] for rank_s in all_s) for name in plans}

    def _time(
        self,
        plans: Mapping[str, PipelinePlan],
        batches: Sequence[Any],
        window: Window,
    ) -> dict[str, float]:
        """Run a window of each plan, and return the mean seconds of its iterations."""
        self.pulls.measure()
        means_s = {}
        # All pipelines stay open during the trial, so that no window includes the start of threads.
        # The state is the same for all plans, since they run the same tasks.
        with ExitStack() as stack:
            pipes = {name: stack.enter_context(self.opened(plan)) for name, plan in plans.items()}
            saved = trial_state(next(iter(pipes.values())), batches[0], self.state)
            for name, pipe in pipes.items():
                timer = WindowTimer(pipe, batches, None, *window, pipelined=True, pulls=self.pulls)
                # Each window starts from the saved state, or later plans would train on what
                # earlier ones left.
                with saved.trial(), borrowed(pipe):
                    means_s[name] = fmean(timer.window())
        return means_s

    def through(self, fits: int = MOST) -> Window:
        """Return a window through the batches, and through a pass of the loader if that fits."""
        length = self.pulls.length
        return Window().through(length if 0 < length <= fits else min(len(self.batches), fits))

    def _cycle(self, window: Window) -> int:
        """Return the number of batches that a window uses cyclically."""
        # If a window is a whole pass, the batches must divide it, or some would come more often.
        if self.pulls.length == window.num_measure:
            return int(self.batches.dividing(window.num_measure))
        return window.num_measure

    def inferred_plan(self, recording: Recording) -> PipelinePlan:
        """Return the recorded dependences as a plan, with streams and global order as in ``like``.

        The plan has names instead of tasks, so that it can be sent to other ranks.
        """
        plan = recording.plan()
        schedule = dict(plan.schedule)
        for task, known in ({} if self.like is None else self.like.schedule).items():
            if task in schedule:
                # Either suffices: a collective that the recording missed may be declared in
                # ``like``.
                ordered = schedule[task].globally_ordered or known.globally_ordered
                schedule[task] = TaskSchedule(stream=known.stream, globally_ordered=ordered)
        return replace(plan, schedule=schedule, tasks=())


def autotune(
    tasks: Iterable[PipelineTask],
    batches: Iterable[Any],
    *,
    device: Device | torch.device | str | None = None,
    context: type[TypedContext] | None = None,
    loader: Iterable[Any] | None = None,
    limits: Limits | None = None,
    ready_made: Mapping[str, PipelinePlan] | None = None,
    ranks: Ranks | None = None,
    seconds: float | None = 60.0,
) -> Tuned:
    """Choose a plan for a loop by trial, and say why; standard error has a line for each step.

    The serial plan, the ready-made plans and up to two planned ones are run alternately. The
    simplest plan (serial, then ready-made, then planned) is chosen, unless another is faster by
    more than the trial's spread. The state of the tasks is restored after each step.

    Args:
        tasks: The tasks in serial order.
        batches: The batches of the loop in order, at least one. A sample is taken if there are
            many. Without ``loader``, training is assumed to take its batches from an object of this
            kind, such as a list.
        device: See ``SWPipeline``.
        context: See ``SWPipeline``.
        loader: The object that training takes its batches from, such as a ``DataLoader``. Its calls
            are measured and planned too, and each trial makes them. If nothing is known of what
            the loader uses, they come after the iteration before. Otherwise (a list, or a
            DataLoader with workers) a thread of their own may make them, if that is faster.
        limits: Limits of the plan; None for ``Limits()``.
        ready_made: Name to plan. A plan that exceeds the limits, or that could give other numbers
            than the serial loop, is left out. Tasks keep the streams that they have in the first
            one, and communicate if they are globally ordered there.
        ranks: The ranks to choose for. The simulator adds to each plan's measured step what more
            ranks than those of the trial cost. None for the ranks that there are.
        seconds: About how long tuning may take; None for no limit. A short time means fewer
            iterations, and a wider spread of the trial. At least one batch is measured, and two
            rounds are run, whatever they take.

    Raises:
        ValueError: There are no batches, or ``seconds`` is not above 0.
        PlanError: The limits admit no plan, a task is unknown, or no plan was found within
            ``limits.max_bytes``; or ``ranks`` does not fit the tasks.
        BaseException: Any exception of a task.
    """
    ready_made = ready_made or {}
    loop = Loop(
        tuple(tasks),
        batches,
        device,
        next(iter(ready_made.values()), None),
        context=context,
        loader=loader,
        apart=is_apart(batches if loader is None else loader),
        ranks=ranks,
        progress=lambda line: sys.stderr.write(f"autotune: {line}\n"),
    )
    return tune(loop, limits or Limits(), ready_made, seconds)


def tune(
    loop: Loop,
    limits: Limits,
    ready_made: Mapping[str, PipelinePlan],
    seconds: float | None = None,
) -> Tuned:
    """Choose a plan for a loop with more facts than ``autotune`` takes; see ``autotune``."""
    budget = Budget(seconds)
    loop = replace(loop, budget=budget)
    load = load_so_far()
    loop = loop.agreed()
    recording = loop.record()
    if clause := disturbance(load and load.others()):
        loop.progress(clause)
    # The recording has found the state to restore, so later steps need not look for it.
    loop = replace(loop, state=recording.owners)
    loop = replace(loop, memory=loop.measure_memory())
    inferred = loop.inferred_plan(recording)
    alone = loop.measure(inferred, _MEASURED_BY)
    costs = alone
    planned = [_planned(PLANNED, loop, inferred, recording, costs, limits)]
    if planned[0].plan.depth > 1 and budget.allows(0, _MEASURED_BY):
        # Tasks that run side by side slow each other down, so costs are measured once more
        # under the plan, and a second plan is made from them.
        costs = loop.measure(planned[0].plan, _AGAIN_BY)
        planned.append(_planned(PLANNED_AGAIN, loop, inferred, recording, costs, limits))
    # Costs do not say which tasks wait and which compute. Those that compute need no more
    # workers than the cores of rank 0, whose plan is used.
    workers = gather(cores())[0]
    if any(each.plan.most_workers > workers for each in planned):
        name = f"{PLANNED}, {counted(workers, 'worker')}"
        fewer = replace(limits, workers=workers)
        planned.insert(0, _planned(name, loop, inferred, recording, costs, fewer))
    simple, left_out = _simple(loop, recording, costs, limits, ready_made)
    # The order is that of simplicity, which decides between candidates that are equally fast.
    candidates = _try(loop, (*simple, *planned))
    if loop.ranks is not None:
        candidates = on_ranks(
            candidates,
            costs,
            loop.ranks,
            inferred,
            tried_on=len(gather(0)),
            streams=loop.has_streams,
        )
    chosen = choose(candidates)
    held = peak_of(chosen.plan, costs, streams=loop.has_streams)
    why = [*explain(candidates, chosen, alone), *beside_the_others(limits, recording.effects)[1]]
    why += [*left_out, *budget.outcome(), *(() if held is None else (held.format(),))]
    other_load = load and load.others()
    # Two plans may have the same reasons, each of which is said once.
    return Tuned(chosen, candidates, tuple(dict.fromkeys(why)), recording, costs, other_load)


# ------------------------------------------------------------------------------------ candidates


def _planned(
    name: str,
    loop: Loop,
    inferred: PipelinePlan,
    recording: Recording,
    costs: CostModel,
    limits: Limits,
) -> Candidate:
    """Return the planner's plan as a candidate; on several ranks, that of rank 0."""
    choice = auto_plan(
        inferred,
        costs,
        limits=limits,
        streams=loop.has_streams,
        effects=recording.effects,
        effort=EFFORT,
        slack=_SAME,
        ranks=loop.ranks,
    )
    plan = choice.plan
    why = choice.why
    # A deeper pipeline costs only memory, and lets slow batches overlap with more others. A single
    # thread could not use it.
    deeper = replace(plan, pipeline_depth=plan.depth + 1)
    if (
        choice.threads > 1
        and plan.depth < limits.in_flight
        and loop.admits(deeper, costs, limits.max_bytes)
    ):
        plan = deeper
        why = (*why, "One more iteration in flight evens out batches that take longer.")
    # Every rank needs the same plan, whatever its own planner found.
    return gather(Candidate(name, plan, loop.predicted_us(plan, costs), why))[0]


def _simple(
    loop: Loop,
    recording: Recording,
    costs: CostModel,
    limits: Limits,
    ready_made: Mapping[str, PipelinePlan],
) -> tuple[list[Candidate], list[str]]:
    """Return the serial and the ready-made candidates, and why ready-made plans are left out."""
    # Plans are sent between ranks, so they carry no tasks.
    plans = {SERIAL: replace(PipelinePlan.serial(loop.tasks), tasks=())}
    left_out = []
    for name, plan in ready_made.items():
        if not limits.allow(plan):
            reason = "it is above the limits"
        # A ready-made plan cannot be changed to keep the frozen tasks where they are.
        elif limits.frozen:
            reason = "the limits freeze tasks"
        elif not keeps_order(loop, recording, plan):
            reason = "it could give other numbers than the serial loop"
        elif not loop.admits(plan, costs, limits.max_bytes):
            reason = "it holds more than max_bytes"
        else:
            plans[name] = plan
            continue
        left_out.append(f"The ready-made plan {name} was not tried: {reason}.")
    predicted = ((name, plan, loop.predicted_us(plan, costs)) for name, plan in plans.items())
    return [Candidate(*each) for each in predicted], left_out


def keeps_order(loop: Loop, recording: Recording, plan: PipelinePlan) -> bool:
    """Return whether a plan for the loop's tasks gives the numbers of the serial loop.

    Raises:
        PlanError: The plan cannot run.
    """
    before = HappensBefore.of(validate(plan, loop.tasks), streams=loop.has_streams)
    return not race_problems(recording.effects, [before])


# ----------------------------------------------------------------------------------------- trial


def _try(loop: Loop, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Run all candidates in each round, in an order that alternates."""
    budget = loop.budget
    loop.progress(f"trying {', '.join(candidate.name for candidate in candidates)}")
    plans = {candidate.name: candidate.plan for candidate in candidates}
    rounds_s: list[dict[str, float]] = []
    window = budget.window(_ROUNDS * len(plans), 1.0, loop.through())
    each = len(plans) * window.iterations
    for turn in range(_ROUNDS):
        # Two rounds are needed for a spread, so they run even beyond the limit.
        if turn >= _LEAST_ROUNDS and not budget.allows(each):
            break
        with budget.spending(each):
            rounds_s.append(loop.try_round(plans, turn, window))
    return tuple(
        replace(candidate, rounds_us=tuple(1e6 * took_s[candidate.name] for took_s in rounds_s))
        for candidate in candidates
    )
