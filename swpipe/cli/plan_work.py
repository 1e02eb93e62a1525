"""What the planning commands share: dependences recorded, costs measured, a plan chosen.

On several ranks all record, measure, plan and try, and then go by what all of them found::

    record     a task touches what it touches on any rank: tables, say, are not the same on all
    measure    a task costs its mean over the ranks. Who comes first to a collective waits there for
               the others: the greatest times of all would count that wait on top of what is waited
               for
    plan       each for itself, and all take rank 0's
    try        a plan is as fast as the slowest rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from swpipe.analysis.races import race_problems
from swpipe.cli.user_errors import UserError, about_plan, in_one_line
from swpipe.cli.workload import Workload
from swpipe.core.costs import CostModel
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.device import resolve
from swpipe.pipeline import SWPipeline
from swpipe.planning import Bounds, Choice, Limits, auto_plan, simulate
from swpipe.trace import Trace

if TYPE_CHECKING:
    from swpipe.inference import Recording

T = TypeVar("T")

AUTO = "auto"
"""The plan that is yet to be made."""

EFFORT = 5.0
"""Planning takes a second then, and little beside what recording and measuring take."""

_BATCHES = 3  # that costs are measured on


def record_workload(work: Workload) -> Recording:
    """What its tasks touch, on any rank; two serial iterations on its first batch."""
    from swpipe.inference import record

    typer.echo(f"recording what the tasks of {work.name} touch", err=True)
    with about_plan(work.name):
        own = record(work.tasks, work.take(1)[0], device=work.device)
    return own.together(work.over_ranks(replace(own, tasks=())))


def measure_workload(work: Workload, plan: PipelinePlan) -> CostModel:
    """What its tasks cost while ``plan`` runs: beside each other, as they will be."""
    from swpipe.profiler import measure_costs

    typer.echo(f"measuring what the tasks of {work.name} cost", err=True)
    with SWPipeline(plan, work.tasks, device=work.device) as pipe:
        own = measure_costs(pipe, work.take(_BATCHES), pipelined=plan.depth > 1)
    return CostModel.mean(work.over_ranks(own))


def has_streams(work: Workload | None, costs: CostModel) -> bool:
    """Whether to plan for a device with streams: the workload's, or one that costs speak of."""
    if work is not None:
        return resolve(work.device).has_streams
    return any(cost.device_us for cost in costs.tasks.values())


def load_costs(path: Path) -> CostModel:
    """A cost model from a file.

    Raises:
        UserError: There is no such file, or it is something else.
    """
    return _loaded(CostModel.load, path, "costs ")


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan made for a workload.

    Attributes:
        choice: The plan, and why.
        costs: What it was made from.
        streams: Whether it was made for a device with streams.
        tried_us: What an iteration took when it was tried; None where it was not.
    """

    choice: Choice
    costs: CostModel
    streams: bool
    tried_us: float | None = None


def tell_first_time() -> None:
    """Say why the first plan of all takes its time, where it does."""
    from swpipe.planning.modulo.compiled import first_time  # and with it numba, where it is there

    if first_time():
        typer.echo("compiling the planner's loops, once: this takes a minute", err=True)


def plan_workload(work: Workload, limits: Limits | None = None) -> Planned:
    """Record a workload, measure it, plan, and take the plan that really is the fastest.

    Tasks that run side by side slow each other on a machine with few cores. So the first plan, made
    from what tasks cost alone, is run for its costs, and the second is made from those. Both are
    tried beside the workload's ready-made plans, for a model is only about right.
    """
    limits = limits or Limits()
    recording = record_workload(work)
    carrier = inferred_plan(work, recording)
    streams = resolve(work.device).has_streams

    tell_first_time()

    def planned(costs: CostModel) -> Choice:
        choice = auto_plan(
            carrier,
            costs,
            limits=limits,
            streams=streams,
            effects=recording.effects,
            effort=EFFORT,
        )
        first: Choice = work.over_ranks(with_slack(choice, limits))[0]
        return first

    costs = measure_workload(work, carrier)
    finalists = {"planned from costs alone": planned(costs)}
    if finalists["planned from costs alone"].in_flight > 1:
        costs = measure_workload(work, finalists["planned from costs alone"].plan)
        finalists["planned from costs side by side"] = planned(costs)
    bounds = next(reversed(finalists.values())).bounds
    for name, make in work.plans.items():
        ready = make()
        safe = not race_problems(resolve_plan(ready), recording.effects, streams=streams)
        if ready.depth > 1 and safe and _within(ready, limits):
            finalists[name] = _ready_made(name, ready, costs, bounds, streams)
    choice, tried_us = _fastest(work, finalists)
    return Planned(choice, costs, streams, tried_us)


def _within(plan: PipelinePlan, limits: Limits) -> bool:
    fits = plan.depth <= limits.in_flight and len(plan.thread_groups) <= limits.threads
    return fits and not limits.frozen


def _ready_made(
    name: str, plan: PipelinePlan, costs: CostModel, bounds: Bounds, streams: bool
) -> Choice:
    """A plan that nobody had to make."""
    return Choice(
        plan=plan,
        ii_us=simulate(plan, costs, streams=streams).ii_us,
        bounds=bounds,
        in_flight=plan.depth,
        threads=len(plan.thread_groups),
        why=(f"It is the ready-made plan {name}.",),
    )


def _fastest(work: Workload, finalists: Mapping[str, Choice]) -> tuple[Choice, float]:
    """The one, and what an iteration took under it; microseconds."""
    from swpipe.profiler import try_plans

    typer.echo(f"trying {', '.join(finalists)}", err=True)
    own_s = try_plans(
        work.tasks,
        {name: choice.plan for name, choice in finalists.items()},
        [*work.take(_BATCHES), *work.take(1)],
        num_warmup=5,
        num_measure=20,
        device=work.device,
    )
    all_s = work.over_ranks(own_s)
    took_s = {name: max(rank_s[name] for rank_s in all_s) for name in own_s}
    # On a tie the ready-made plan, which is the last: it is known to work.
    best = min(reversed(took_s), key=lambda name: round(took_s[name] / min(took_s.values()), 2))
    told = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in took_s.items())
    chosen = finalists[best]
    return replace(chosen, why=(*chosen.why, f"Tried side by side: {told}.")), 1e6 * took_s[best]


def with_slack(choice: Choice, limits: Limits) -> Choice:
    """One more iteration in flight, where that helps threads to be late for once.

    A cost model says that a task always takes the same; real ones vary from batch to batch.
    """
    if choice.threads == 1 or choice.in_flight >= limits.in_flight:
        return choice
    depth = choice.in_flight + 1
    return replace(
        choice,
        plan=replace(choice.plan, pipeline_depth=depth),
        in_flight=depth,
        why=(*choice.why, "One iteration more in flight evens out batches that take longer."),
    )


def inferred_plan(work: Workload, recording: Recording) -> PipelinePlan:
    """The dependences that were found, and the streams and turns that the workload names.

    Without the tasks themselves: it is for whoever runs tasks of these names, on other ranks too.
    """
    plan = recording.plan()
    schedule = {
        task: replace(
            entry,
            stream=work.streams.get(task),
            globally_ordered=entry.globally_ordered or task in work.ordered,
        )
        for task, entry in plan.schedule.items()
    }
    return replace(plan, schedule=schedule, tasks=())


def window(trace: Trace, iterations: int) -> Trace:
    """The last so many iterations of a trace."""
    numbers = sorted({span.iteration for span in trace.spans})
    return trace.window(numbers[max(0, len(numbers) - iterations)], numbers[-1])


def load_trace(path: Path) -> Trace:
    """A saved timeline.

    Raises:
        UserError: There is no such file, or it is something else.
    """
    return _loaded(Trace.load, path)


def _loaded(load: Callable[[Path], T], path: Path, what: str = "") -> T:
    try:
        return load(path)
    except OSError as error:
        raise UserError(f"{what}{path}: {error.strerror}") from error
    except ValueError as error:  # a PlanError, broken JSON and bytes that are no text, too
        raise UserError(f"{what}{path}: {in_one_line(error)}") from error


def keep_plan(plan: PipelinePlan, path: Path | None) -> None:
    """Write a plan where the user wants one."""
    if path is not None:
        make_room(path)
        plan.save(path)
        typer.echo(f"written to {path}")


def keep_costs(costs: CostModel, path: Path | None) -> None:
    """Write costs where the user wants them."""
    if path is not None:
        make_room(path)
        costs.save(path)
        typer.echo(f"costs written to {path}")


def make_room(path: Path) -> None:
    """Make the directory that a file is to go into."""
    path.parent.mkdir(parents=True, exist_ok=True)


def names(given: Sequence[str] | None) -> tuple[str, ...]:
    """``a,b`` and ``a`` ``b`` alike."""
    return tuple(name for text in given or () for name in text.split(",") if name)
