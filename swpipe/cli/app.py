"""The commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from swpipe.cli import launched as ranks
from swpipe.cli import options, plan_commands
from swpipe.cli.click_commands import (
    format_breakdown,
    format_outcome,
    format_training,
    open_runs,
    profile_job,
    save_results,
    train_runs,
)
from swpipe.cli.inputs import job_class, load_plan, make_config
from swpipe.cli.plan_work import AUTO, load_trace, make_room, plan_workload
from swpipe.cli.user_errors import UserError, about_plan, one_line_errors
from swpipe.cli.workload import click_plans, click_workload, usual_plan
from swpipe.plans.clicks import PLANS

app = typer.Typer(
    help="Software pipelining for PyTorch: train a click model, measure it, plan it, look at it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RANKED = ("train", "profile", "plan")
"""Commands that several ranks run together."""

app.add_typer(plan_commands.app, name="plan")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Without the program's name; None for those of the process.

    Raises:
        SystemExit: Always: 0 when all went well, 2 when the user got something wrong.
    """
    given = sys.argv[1:] if args is None else args
    run = partial(app, args=options.spread_lists(given), prog_name="swpipe")
    if ranks.launched():
        sys.exit(ranks.run_on_ranks(lambda job: run(standalone_mode=False, obj=job)))
    run()


@app.callback()
def check_command(context: typer.Context) -> None:
    """Under torchrun some commands run on all ranks; the others make no sense there."""
    with one_line_errors():
        if context.obj is not None and context.invoked_subcommand not in RANKED:
            raise UserError(
                f"{context.invoked_subcommand}: under torchrun there are {', '.join(RANKED)}; "
                "start this one without it"
            )


@app.command("train")
def train(
    context: typer.Context,
    data: options.Data = None,
    held_out: options.HeldOut = None,
    plan: options.Plan = "",
    compare: Annotated[
        str, typer.Option(metavar="PLAN,PLAN", help="Train under each of these, and compare.")
    ] = "",
    steps: Annotated[
        int | None, typer.Option(min=1, help="How many; none: once through the data.")
    ] = None,
    batch_size: options.BatchSize = 2048,
    device: options.Device = "cpu",
    seed: options.Seed = 0,
    strict: options.Strict = False,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="OUT.json", help="Record the last steps; for Perfetto or `trace`."),
    ] = None,
    cache_dir: options.Cache = options.CACHE,
) -> None:
    """Train the click model."""
    with one_line_errors():
        if plan and compare:
            raise UserError("--plan and --compare: give one of them")
        job: ranks.RankedJob | None = context.obj
        wanted = (compare or plan or usual_plan(job)).split(",")
        plans = {name: load_plan(name, click_plans(job)) for name in wanted if name != AUTO}
        if job is not None:
            given = [plans.get(name) for name in wanted]
            job.agree(ranks.facts_of("train", context.params, given))
        make = partial(make_config, data, held_out, batch_size, device, seed, strict, cache_dir)
        config = make() if job is None else ranks.on_all(job, make)
        planned = None
        if AUTO in wanted:
            with closing(job_class(job is not None)(config)) as trial:
                planned = plan_workload(click_workload(trial, job))
            plans = {name: plans.get(name, planned.choice.plan) for name in wanted}
            typer.echo(f"auto: {planned.choice.format()}")
        with open_runs(config, plans, steps, ranked=job is not None) as runs:
            recorded = train_runs(runs)
            typer.echo(format_training(runs))
            if planned is not None:
                typer.echo(format_outcome(planned, runs[wanted.index(AUTO)]))
            if (out := ranks.written(job, timeline)) is not None:
                make_room(out)
                recorded.save(out)
                typer.echo(f"timeline of the last steps under {runs[-1].name}: {out}")


@app.command("profile")
def profile(
    context: typer.Context,
    data: options.Data = None,
    plan: options.Plan = "",
    serially: Annotated[
        bool, typer.Option("--serially", help="Measure the plain loop instead of the plan.")
    ] = False,
    batches: Annotated[int, typer.Option(min=1, help="Batches to show side by side.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of baseline and shortcuts.")] = 3,
    batch_size: options.BatchSize = 2048,
    device: options.Device = "cpu",
    seed: options.Seed = 0,
    strict: options.Strict = False,
    output: Annotated[
        Path | None, typer.Option(metavar="OUT.json", help="Write the figures as JSON.")
    ] = None,
    cache_dir: options.Cache = options.CACHE,
) -> None:
    """Show what each task of the click job really costs: its exposed time."""
    with one_line_errors():
        job: ranks.RankedJob | None = context.obj
        plan = plan or usual_plan(job)
        loaded = load_plan(plan, click_plans(job))
        if job is not None:
            job.agree(ranks.facts_of("profile", context.params, [loaded]))
        make = partial(make_config, data, None, batch_size, device, seed, strict, cache_dir)
        config = make() if job is None else ranks.on_all(job, make)
        ranked = job is not None
        with about_plan(plan):
            results = profile_job(
                config, loaded, batches, rounds, pipelined=not serially, ranked=ranked
            )
        typer.echo(format_breakdown(results))
        if (out := ranks.written(job, output)) is not None:
            make_room(out)
            results.save(out)
            typer.echo(f"written to {out}")


@app.command("trace")
def draw_trace(
    timeline: Annotated[Path, typer.Argument(help="JSON from `swpipe train --timeline`.")],
    output: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="PNG, SVG or PDF; default: beside it.")
    ] = None,
) -> None:
    """Draw a saved timeline."""
    with one_line_errors():
        picture = timeline.with_suffix(".png") if output is None else output
        make_room(picture)
        recorded = load_trace(timeline)
        try:
            recorded.plot(picture)
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}") from error
        except (ValueError, ImportError) as error:
            raise UserError(f"{timeline}: {error}") from error
        typer.echo(recorded.format_summary())
        typer.echo(f"drawn into {picture}")


@app.command("demo")
def demo(
    directory: Annotated[Path, typer.Option(help="Where data and results go.")] = Path(
        "build/demo"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Under each plan.")] = 322,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 4096,
    seed: options.Seed = 0,
) -> None:
    """Train serially and pipelined, compare, break down, draw; in under three minutes."""
    with one_line_errors():
        config = make_config(None, None, batch_size, "cpu", seed, False, directory)
        typer.echo("Training the same click model under both plans, by turns.")
        plans = {name: PLANS[name]() for name in ("serial", "pipelined")}
        with open_runs(config, plans, steps) as runs:
            recorded = train_runs(runs)
            typer.echo("\nWhat each task costs, in the plain loop and under the plan.")
            breakdown = [
                profile_job(config, plans["pipelined"], 1, 3, pipelined=on, labels=[label])
                for label, on in (("plain loop", False), ("under the plan", True))
            ]
            files = save_results(directory, recorded, breakdown)
            for results in breakdown:
                typer.echo(f"\n{format_breakdown(results)}")
            typer.echo(f"\n{format_training(runs)}")
            typer.echo("\n  ".join(["files:", *map(str, files)]))
