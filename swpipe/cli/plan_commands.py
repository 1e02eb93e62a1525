"""`swpipe plan`: dependences inferred, plans checked, simulated, chosen and shown.

On several ranks as well: all do the same, and rank 0 writes the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swpipe.analysis import verify
from swpipe.cli import options
from swpipe.cli.inputs import load_plan
from swpipe.cli.launched import RankedJob, facts_of, written
from swpipe.cli.plan_work import (
    EFFORT,
    Planned,
    has_streams,
    inferred_plan,
    keep_costs,
    keep_plan,
    load_costs,
    load_trace,
    make_room,
    measure_workload,
    names,
    plan_workload,
    record_workload,
    tell_first_time,
    window,
)
from swpipe.cli.user_errors import UserError, about_plan, one_line_errors
from swpipe.cli.workload import click_plans, open_workload
from swpipe.core.task import PipelineTask
from swpipe.pipeline import SWPipeline
from swpipe.planning import Limits, lower_bounds, recsys14
from swpipe.planning import simulate as play_out
from swpipe.planning.modulo.auto import auto_plan
from swpipe.plans import sharded_clicks
from swpipe.plans.clicks import PLANS
from swpipe.trace import format_stacked, plot_stacked

app = typer.Typer(
    help="Infer dependences, check plans, simulate them, choose one, show one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PAPER = {"recsys14": recsys14.plan}
"""Plans on paper, whose costs come with them."""

SHOWN = {**PLANS, **sharded_clicks.PLANS, **PAPER}
"""All plans by name; one that both click jobs have is that of the job at hand."""

PlanName = Annotated[str, typer.Argument(metavar="PLAN", help="Its name, or FILE.toml or .json.")]
Costs = Annotated[
    Path | None,
    typer.Option(metavar="COSTS.json", help="What tasks cost; none: measured on the workload."),
]
KeepCosts = Annotated[
    Path | None,
    typer.Option("--keep-costs", metavar="OUT.json", help="Write the costs that were used."),
]
Output = Annotated[
    Path | None, typer.Option(metavar="OUT.toml", help="Write the plan, as TOML or JSON.")
]


@app.command("show")
def show(
    context: typer.Context,
    plan: PlanName,
    periods: Annotated[int, typer.Option(min=1, help="Periods to show.")] = 6,
    output: Output = None,
) -> None:
    """Show a plan: which task works on which iteration when, and what waits for what."""
    with one_line_errors():
        job: RankedJob | None = context.obj
        loaded = load_plan(plan, {**SHOWN, **click_plans(job)})
        tasks = [PipelineTask(name, lambda ctx: None) for name in loaded.schedule]
        with about_plan(plan), SWPipeline(loaded, tasks, device="cpu") as pipe:
            typer.echo(f"{pipe.format_schedule(periods)}\n\n{pipe.format_stage_analysis()}")
        keep_plan(loaded, written(job, output))


@app.command("infer")
def infer(
    context: typer.Context,
    workload: options.Workload = "clicks",
    plan: Annotated[
        str, typer.Option(metavar="PLAN", help="Compare with what this plan declares.")
    ] = "",
    data: options.Data = None,
    batch_size: options.BatchSize = 2048,
    device: options.OptionalDevice = None,
    seed: options.Seed = 0,
    cache_dir: options.Cache = options.CACHE,
    output: Output = None,
) -> None:
    """Record two iterations: what each task touches, and the dependences that follow."""
    with one_line_errors():
        job = _agreed(context)
        work = open_workload(workload, data, batch_size, device, seed, cache_dir, job)
        compared = load_plan(plan, work.plans) if plan else None
        recording = record_workload(work)
        with about_plan(plan or workload):
            typer.echo(str(recording.report(compared)))
        keep_plan(inferred_plan(work, recording), written(job, output))


@app.command("check")
def check(
    context: typer.Context,
    plan: PlanName,
    workload: options.Workload = "clicks",
    budget: Annotated[
        int | None, typer.Option(min=1, metavar="BYTES", help="What may be in flight at most.")
    ] = None,
    data: options.Data = None,
    batch_size: options.BatchSize = 2048,
    device: options.OptionalDevice = None,
    seed: options.Seed = 0,
    cache_dir: options.Cache = options.CACHE,
) -> None:
    """Check a plan against what its tasks touch: the same numbers in every interleaving?"""
    with one_line_errors():
        work = open_workload(workload, data, batch_size, device, seed, cache_dir, _agreed(context))
        loaded = load_plan(plan, work.plans)
        recording = record_workload(work)
        with about_plan(plan):
            verified = verify(
                loaded,
                work.tasks,
                recording.effects,
                sizes=recording.sizes,
                budget_bytes=budget,
            )
        typer.echo(f"{plan}: all {verified.orders} orders are kept in every interleaving")
        if verified.footprint is not None:
            typer.echo(verified.footprint.format())


@app.command("simulate")
def simulate(
    context: typer.Context,
    plan: PlanName,
    costs: Costs = None,
    workload: options.Workload = "clicks",
    measured: Annotated[
        Path | None, typer.Option(metavar="TIMELINE.json", help="What was measured; shown below.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Draw the timeline: PNG, SVG or PDF.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="OUT.json", help="Save it, for Perfetto or `trace`.")
    ] = None,
    width: Annotated[int, typer.Option(min=40, help="Columns of the timeline.")] = 100,
    data: options.Data = None,
    batch_size: options.BatchSize = 2048,
    device: options.OptionalDevice = None,
    seed: options.Seed = 0,
    cache_dir: options.Cache = options.CACHE,
    keep: KeepCosts = None,
) -> None:
    """Predict a plan's timeline and interval from what its tasks cost."""
    with one_line_errors():
        job, work = _agreed(context), None
        if plan in PAPER:
            loaded = PAPER[plan]()
            model = recsys14.costs() if costs is None else load_costs(costs)
        elif costs is not None:
            loaded, model = load_plan(plan, click_plans(job)), load_costs(costs)
        else:
            work = open_workload(workload, data, batch_size, device, seed, cache_dir, job)
            loaded = load_plan(plan, work.plans)
            model = measure_workload(work, loaded)
        streams = has_streams(work, model)
        with about_plan(plan):
            result = play_out(loaded, model, streams=streams)
            bounds = lower_bounds(loaded, model, streams=streams)
        traces = {"predicted": result.trace()}
        if measured is not None:
            traces["measured"] = window(load_trace(measured), result.iterations)
        typer.echo(f"{format_stacked(traces, width)}\n\n{result.format()}\n\n{bounds.format()}")
        if (drawn := written(job, picture)) is not None:
            make_room(drawn)
            plot_stacked(traces, drawn)
            typer.echo(f"drawn into {drawn}")
        if (saved := written(job, timeline)) is not None:
            make_room(saved)
            result.trace().save(saved)
            typer.echo(f"timeline: {saved}")
        keep_costs(model, written(job, keep))


@app.command("auto")
def auto(
    context: typer.Context,
    plan: Annotated[
        str, typer.Argument(metavar="[PLAN]", help="Carries dependences; none: inferred.")
    ] = "",
    costs: Costs = None,
    workload: options.Workload = "clicks",
    in_flight: Annotated[int, typer.Option(min=1, help="Iterations in flight at most.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Thread groups at most.")] = 4,
    frozen: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK,TASK", help="Stay in the last stage, on the caller's thread."),
    ] = None,
    data: options.Data = None,
    batch_size: options.BatchSize = 2048,
    device: options.OptionalDevice = None,
    seed: options.Seed = 0,
    cache_dir: options.Cache = options.CACHE,
    keep: KeepCosts = None,
    output: Output = None,
) -> None:
    """Choose the best plan under limits, and say why."""
    with one_line_errors():
        job = _agreed(context)
        limits = Limits(in_flight=in_flight, threads=threads, frozen=names(frozen))
        if not plan:
            if costs is not None:
                raise UserError("--costs: name the plan too that carries the dependences")
            work = open_workload(workload, data, batch_size, device, seed, cache_dir, job)
            with about_plan(workload):
                planned = plan_workload(work, limits)
        else:
            paper = plan in PAPER
            loaded = PAPER[plan]() if paper else load_plan(plan, click_plans(job))
            if costs is None and not paper:
                raise UserError("--costs: say what the plan's tasks cost, or name no plan")
            model = recsys14.costs() if costs is None else load_costs(costs)
            streams = has_streams(None, model)
            tell_first_time()
            with about_plan(plan):
                choice = auto_plan(loaded, model, limits=limits, streams=streams, effort=EFFORT)
            planned = Planned(choice, model, streams)
        typer.echo(planned.choice.format())
        keep_costs(planned.costs, written(job, keep))
        keep_plan(planned.choice.plan, written(job, output))


def _agreed(context: typer.Context) -> RankedJob | None:
    """This process as one rank of several, if it is; all of them were told the same."""
    job: RankedJob | None = context.obj
    if job is not None:
        facts = facts_of(f"plan {context.info_name}", context.params, ())
        job.agree({**facts, "the plan": str(context.params["plan"] or "none")})
    return job
