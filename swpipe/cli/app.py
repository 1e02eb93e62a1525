"""The commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swpipe.cli import launched as ranks
from swpipe.cli import options, plan_commands
from swpipe.cli.arguments import (
    AUTO,
    OpenWorkload,
    configured,
    find_workload,
    load_file,
    load_plan,
    save,
)
from swpipe.cli.user_errors import UserError, about_plan, one_line_errors
from swpipe.core.plan import PipelinePlan
from swpipe.pipeline import SWPipeline
from swpipe.tasks.workload import DEFAULT, Job, Run, Training, Workload, alternate
from swpipe.trace import Trace

if TYPE_CHECKING:
    from swpipe.planning.autotuning import Tuned
    from swpipe.profiler import ProfileResults

_TRACED = 12  # steps in a timeline
_TURN = 100  # steps under one plan, before the next one has its turn

app = typer.Typer(
    help="Software pipelining for PyTorch: train a model, measure it, plan it, look at it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ON_RANKS = ("train", "profile", "plan")
"""Commands that several ranks run together."""

app.add_typer(plan_commands.app, name="plan")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Without the program's name; None for those of the process.

    Raises:
        SystemExit: Always: 0 when all went well, 2 for a mistake of the user.
    """
    given = sys.argv[1:] if args is None else args
    options.declare_workload_options()
    run = partial(app, args=options.spread_lists(given), prog_name="swpipe")
    if ranks.launched():
        sys.exit(ranks.run_on_ranks(lambda rank: run(standalone_mode=False, obj=rank)))
    run()


@app.callback()
def check_command(context: typer.Context) -> None:
    """Under torchrun some commands run on all ranks; the others make no sense there."""
    with one_line_errors():
        if context.obj is not None and context.invoked_subcommand not in ON_RANKS:
            raise UserError(
                f"{context.invoked_subcommand}: under torchrun there are {', '.join(ON_RANKS)}; "
                "start this one without it"
            )


@app.command("train")
@options.takes_workload_options
def train(
    context: typer.Context,
    workload: options.Workload = DEFAULT,
    plan: options.Plan = "",
    compare: Annotated[
        str, typer.Option(metavar="PLAN,PLAN", help="Train under each of these, and compare.")
    ] = "",
    steps: Annotated[
        int | None, typer.Option(min=1, help="How many; none: once through the data.")
    ] = None,
    device: options.Device = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="OUT.json", help="Record the last steps; for Perfetto or `trace`."),
    ] = None,
    **given: Any,
) -> None:
    """Train a workload: the click model, unless another is named."""
    with one_line_errors():
        if plan and compare:
            raise UserError("--plan and --compare: give one of them")
        rank: ranks.Rank | None = context.obj
        work = find_workload(workload, rank)
        training = _training(work)
        wanted = (compare or plan or work.usual_plan).split(",")
        plans = {name: load_plan(name, work.plans) for name in wanted if name != AUTO}
        if rank is not None:
            rank.agree(
                ranks.command_facts("train", context.params, [plans.get(name) for name in wanted])
            )
        config = configured(work, {**given, "device": device}, rank)
        tuned = None
        if AUTO in wanted:
            with closing(work.open_job(config)) as job:
                tuned = OpenWorkload(work, job, config.device).tune()
            plans = {name: plans.get(name, tuned.plan) for name in wanted}
            typer.echo(f"auto: {tuned.format()}")
        with open_runs(training, config, plans, steps) as runs:
            recorded = train_runs(runs)
            typer.echo(training.report(runs))
            if tuned is not None:
                typer.echo(format_outcome(tuned, runs[wanted.index(AUTO)]))
            what = f"timeline of the last steps under {runs[-1].name}:"
            save(what, timeline, recorded.save, rank)


@app.command("profile")
@options.takes_workload_options
def profile(
    context: typer.Context,
    workload: options.Workload = DEFAULT,
    plan: options.Plan = "",
    serially: Annotated[
        bool, typer.Option("--serially", help="Measure the plain loop instead of the plan.")
    ] = False,
    batches: Annotated[int, typer.Option(min=1, help="Batches to show side by side.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of baseline and shortcuts.")] = 3,
    device: options.Device = None,
    output: Annotated[
        Path | None, typer.Option(metavar="OUT.json", help="Write the figures as JSON.")
    ] = None,
    **given: Any,
) -> None:
    """Show what each task of a workload really costs: its exposed time."""
    with one_line_errors():
        rank: ranks.Rank | None = context.obj
        work = find_workload(workload, rank)
        plan = plan or work.usual_plan
        loaded = load_plan(plan, work.plans) if work.plans else None
        if rank is not None:
            rank.agree(ranks.command_facts("profile", context.params, [loaded]))
        opened = OpenWorkload.of(workload, {**given, "device": device}, rank)
        with closing(opened.job) as job, about_plan(plan):
            loaded = loaded or load_plan(plan, opened.plans)
            results = profile_job(job, opened.device, loaded, batches, rounds, not serially)
        typer.echo(format_breakdown(results))
        save("written to", output, results.save, rank)


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
        picture.parent.mkdir(parents=True, exist_ok=True)
        recorded = load_file(Trace.load, timeline)
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
    seed: Annotated[int, typer.Option(help="Of the model, and of the generated data.")] = 0,
) -> None:
    """Train serially and pipelined, compare, break down, draw; in under three minutes."""
    with one_line_errors():
        work = find_workload(DEFAULT)
        training = _training(work)
        values = {option.name: option.default for option in work.options}
        chosen = {"batch_size": batch_size, "seed": seed, "cache_dir": directory, "device": "cpu"}
        config = configured(work, {**values, **chosen}, None)
        typer.echo("Training the same model under both plans, in turns.")
        plans = {name: work.plans[name]() for name in ("serial", work.usual_plan)}
        with open_runs(training, config, plans, steps) as runs:
            recorded = train_runs(runs)
            typer.echo("\nWhat each task costs, in the plain loop and under the plan.")
            breakdown = []
            for label, pipelined in (("plain loop", False), ("under the plan", True)):
                with closing(work.open_job(config)) as job:
                    plan = plans[work.usual_plan]
                    breakdown.append(
                        profile_job(job, config.device, plan, 1, 3, pipelined, labels=[label])
                    )
            files = save_results(directory, recorded, breakdown)
            for results in breakdown:
                typer.echo(f"\n{format_breakdown(results)}")
            typer.echo(f"\n{training.report(runs)}")
            typer.echo("\n  ".join(["files:", *map(str, files)]))


# ------------------------------------------------------------------------------ train and profile


def _training(work: Workload) -> Training:
    if work.training is None:
        raise UserError(
            f"workload {work.name}: train cannot train it; use profile or plan, or give it a "
            "Training (swpipe.tasks.workload)"
        )
    return work.training


@contextmanager
def open_runs(
    training: Training, config: Any, plans: Mapping[str, PipelinePlan], steps: int | None
) -> Iterator[list[Run]]:
    """One run per plan, of the same configuration."""
    with ExitStack() as stack:
        runs = []
        for name, plan in plans.items():
            with about_plan(name):
                runs.append(stack.enter_context(training.open_run(name, config, plan, steps)))
        yield runs


def train_runs(runs: Sequence[Run]) -> Trace:
    """Run all steps of all runs, in turns, and record the end of the last run."""
    from tqdm import tqdm

    steps = runs[0].steps
    traced = min(steps, _TRACED)
    with tqdm(total=steps * len(runs), desc="training", unit="step") as bar:
        alternate(runs, steps - traced, chunk=_TURN, on_step=bar.update)
        for run in runs:
            with run.pipe.trace() as recorded:
                run.advance(traced, bar.update, timed=False)
    return recorded


def format_outcome(tuned: Tuned, run: Run) -> str:
    """The interval that was predicted for a plan, that of its trial, and that of training."""
    got_us = 1e6 / run.steps_per_s
    expected, tried = (
        f"{us / 1e3:.3f} ms per step ({got_us / us - 1:+.1%})"
        for us in (tuned.chosen.predicted_us, tuned.chosen.interval_us)
    )
    return f"auto: expected {expected}, tried {tried}, got {got_us / 1e3:.3f}"


def profile_job(
    job: Job,
    device: str | None,
    plan: PipelinePlan,
    batches: int,
    rounds: int,
    pipelined: bool,
    labels: Sequence[str] | None = None,
) -> ProfileResults:
    """Measure the tasks of a job under a plan, or in a plain loop."""
    from swpipe.profiler import TaskProfiler

    with SWPipeline(plan, job.tasks(), device=device) as pipe:
        return TaskProfiler(pipe).profile_many(
            list(job.batches(batches)),
            num_warmup=3,
            num_measure=10,
            num_rounds=rounds,
            pipelined=pipelined,
            verbose=True,
            labels=labels,
        )


def format_breakdown(results: ProfileResults) -> str:
    """One batch in full, or several side by side."""
    return results[0].format_report() if len(results) == 1 else results.format_report()


def save_results(
    directory: Path, recorded: Trace, breakdown: Sequence[ProfileResults]
) -> list[Path]:
    """Save timeline and figures in ``directory``; draw them where matplotlib is installed."""
    from swpipe.profiler import ProfileResults

    timeline = directory / "timeline.json"
    recorded.save(timeline)
    files = [timeline]
    for results in breakdown:
        files.append(directory / f"breakdown-{results[0].mode}.json")
        results.save(files[-1])
    if find_spec("matplotlib"):
        files += [timeline.with_suffix(".png"), directory / "breakdown.png"]
        recorded.plot(files[-2])
        ProfileResults(results[0] for results in breakdown).plot(files[-1])
    return files
