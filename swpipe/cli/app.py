"""The commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import swpipe
from swpipe.cli import diff_command, options, plan_commands, report_command
from swpipe.cli import launched as ranks
from swpipe.cli.arguments import (
    AUTO,
    MEASURED,
    OpenWorkload,
    Output,
    check_outputs,
    configured,
    context_of,
    find_workload,
    load_plan,
    load_timeline,
    loader_of,
    save,
)
from swpipe.cli.held_memory import format_memory
from swpipe.cli.user_errors import UserError, about_plan, echo, exit_code
from swpipe.core.messages import in_ms, plain
from swpipe.core.plan import PipelinePlan
from swpipe.pipeline import SWPipeline
from swpipe.tasks.job_run import JobRun, alternate, report
from swpipe.tasks.workload import DEFAULT, MOST_COUNT, MOST_SEED, Workload
from swpipe.trace import Trace

if TYPE_CHECKING:
    from swpipe.profiler import ProfileResults
    from swpipe.tuning.autotuning import Tuned

SERIAL = "serial"
"""The plan that every workload has."""

_TRACED = 12  # steps in a timeline
_WARM_UP = 3  # steps before it, where only these steps are run
_TURN = 100  # steps under one plan, before the next one has its turn
ROUNDS = 4  # visits to each task

CLICKS_NEED = ("polars", "torchmetrics", "fbgemm_gpu", "torchrec")
"""What the click job imports; without them the demo trains on generated images."""

DEMO_FILES = ("timeline.json", "breakdown-serial.json", "breakdown-pipelined.json")
DEMO_PICTURES = ("timeline.png", "breakdown.png")

app = typer.Typer(
    help="Software pipelining for PyTorch: train a model, measure it, plan it, look at it.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(plan_commands.app, name="plan")
app.command("report")(report_command.report)
app.command("diff")(diff_command.diff)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Without the program's name; None for those of the process.

    Raises:
        SystemExit: Always: 0 when all went well, 2 for a mistake of the user.
    """
    given = (sys.argv[1:] if args is None else args) or ["--help"]
    options.declare_workload_options()
    run = partial(app, args=options.spread_lists(given), prog_name="swpipe", standalone_mode=False)
    if ranks.joins(given):
        sys.exit(exit_code(lambda: ranks.run_on_ranks(lambda rank: run(obj=rank))))
    sys.exit(exit_code(run))


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"swpipe {swpipe.__version__}")
        raise typer.Exit


@app.callback()
def check_command(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Under torchrun some commands run on all ranks; the others make no sense there."""
    if context.obj is not None and context.invoked_subcommand not in ranks.COMMANDS:
        there = ", ".join(ranks.COMMANDS)
        raise UserError(
            f"{context.invoked_subcommand}: under torchrun there are {there}; "
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
    steps: Annotated[int | None, options.count("How many; none: once through the data.")] = None,
    timeline: Annotated[
        Path | None, options.file("OUT.json", "Record the last steps; for Perfetto or `trace`.")
    ] = None,
    **given: Any,
) -> None:
    """Train a workload: the click model, unless another is named, or your own."""
    if plan and compare:
        raise UserError("--plan and --compare: give one of them")
    rank: ranks.Rank | None = context.obj
    check_outputs(rank, timeline)
    work = find_workload(workload, rank)
    wanted = (compare or plan or work.usual_plan).split(",")
    known = [name for name in wanted if name != AUTO and (work.plans or name != SERIAL)]
    plans = {name: load_plan(name, work.plans) for name in known}
    if rank is not None:
        rank.agree(
            ranks.command_facts("train", context.params, [plans.get(name) for name in wanted])
        )
    config = configured(work, given, rank)
    tuned = None
    if unknown := {*wanted} - {*known}:
        with closing(work.open_job(config)) as job:
            opened = OpenWorkload(work, job, config.device)
            if AUTO in unknown:
                tuned = opened.tune()
                plans[AUTO] = tuned.plan
                echo(f"auto: {tuned.format()}")
            if SERIAL in unknown:
                plans[SERIAL] = opened.plans[SERIAL]()
    labelled = list(zip(numbered(wanted), map(plans.__getitem__, wanted), strict=True))
    with open_runs(work, config, labelled, steps) as runs:
        recorded = train_runs(runs)
        echo(report(runs))
        if tuned is not None:
            echo(format_outcome(tuned, runs[wanted.index(AUTO)]))
        what = f"timeline of the last steps under {runs[-1].name}:"
        save(rank, Output(what, timeline, recorded.save))


@app.command("profile")
@options.takes_workload_options
def profile(
    context: typer.Context,
    workload: options.Workload = DEFAULT,
    plan: options.Plan = "",
    serially: Annotated[
        bool, typer.Option("--serially", help="Measure the plain loop instead of the plan.")
    ] = False,
    batches: Annotated[int, options.count("Batches to show side by side.", 100)] = 1,
    rounds: Annotated[
        int, typer.Option(min=2, max=MOST_COUNT, help="Visits to each task.")
    ] = ROUNDS,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="Measure for so long on each batch, instead of --rounds."),
    ] = None,
    output: Annotated[Path | None, options.file("OUT.json", "Write the figures as JSON.")] = None,
    **given: Any,
) -> None:
    """Show what each task of a workload really costs: its exposed time."""
    rank: ranks.Rank | None = context.obj
    check_outputs(rank, output)
    work = find_workload(workload, rank)
    plan = plan or work.usual_plan
    loaded = load_plan(plan, work.plans) if work.plans and plan != AUTO else None
    if rank is not None:
        rank.agree(ranks.command_facts("profile", context.params, [loaded]))
    opened = OpenWorkload.of(workload, given, rank)
    with closing(opened.job), about_plan(plan):
        loaded = loaded or named_plan(opened, plan)
        results = profile_job(opened, loaded, batches, rounds, not serially, seconds=seconds)
        held = format_memory(opened.loop(), None if serially else loaded, results[0])
    echo(f"{format_breakdown(results)}\n{held}")
    save(rank, Output("written to", output, results.save))


@app.command("trace")
@options.takes_workload_options
def draw_trace(
    saved: Annotated[
        Path | None,
        typer.Argument(
            metavar="TIMELINE.json",
            help="From `swpipe train --timeline`; without it --workload is recorded.",
        ),
    ] = None,
    output: Annotated[
        Path | None, options.file("OUT.png", "PNG, SVG or PDF; default: beside a saved timeline.")
    ] = None,
    workload: options.Workload = "",
    plan: options.Plan = "",
    steps: Annotated[int, options.count("How many to record.")] = _TRACED,
    timeline: Annotated[Path | None, options.file("OUT.json", "Write what was recorded.")] = None,
    **given: Any,
) -> None:
    """Draw a saved timeline, or record one of a workload."""
    if (saved is None) == (not workload):
        raise UserError("trace: name a saved timeline, or a --workload to record; one of them")
    if saved is not None:
        if timeline is not None:
            raise UserError("--timeline: it is for what is recorded; name a --workload")
        output = output or saved.with_suffix(".png")
        recorded, what = load_timeline(saved), saved.stem
        check_outputs(None, pictures=[output])
    else:
        check_outputs(None, timeline, pictures=[output])
        opened = OpenWorkload.of(workload, given, None)
        plan = plan or opened.workload.usual_plan
        with closing(opened.job), about_plan(plan):
            recorded = record_job(opened, named_plan(opened, plan), steps)
        what = f"{workload}, plan {plan}"
    echo(recorded.format_summary())
    save(
        None,
        Output("timeline:", timeline, recorded.save),
        Output("drawn into", output, partial(draw, recorded, what)),
    )


@app.command("doctor")
@options.takes_workload_options
def doctor(
    context: typer.Context,
    workload: Annotated[
        str,
        typer.Argument(
            metavar="[NAME|MODULE:FUNCTION]",
            help="The loop; none: examine the machine and its settings only.",
        ),
    ] = "",
    plan: Annotated[
        str, typer.Option(metavar="PLAN", help="Examine its threads and streams, too.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=2, max=MOST_COUNT, help="For the headroom.")] = 4,
    **given: Any,
) -> None:
    """Find what keeps work from overlapping, and how much overlap can gain at most."""
    from swpipe.doctor import diagnose

    if not workload:
        if plan:
            raise UserError("--plan: name the workload, too")
        echo(str(diagnose(device=given["device"])))
        return
    rank: ranks.Rank | None = context.obj
    if rank is not None:
        plans = find_workload(workload, rank).plans
        known = [load_plan(plan, plans)] if plan and plans else []
        rank.agree(ranks.command_facts("doctor", context.params, known))
    opened = OpenWorkload.of(workload, given, rank)
    with closing(opened.job):
        loader = loader_of(opened.job)
        found = diagnose(
            opened.job.tasks(),
            opened.take(MEASURED) if loader is None else loader,
            plan=load_plan(plan, opened.plans) if plan else None,
            device=opened.device,
            context=context_of(opened.job),
            rounds=rounds,
        )
    echo(str(found))


@app.command("demo")
def demo(
    workload: Annotated[
        str,
        typer.Option(
            metavar="clicks|images",
            help="What to train.",
            show_default="clicks where its packages are, else images: with torch alone",
        ),
    ] = "",
    directory: Annotated[Path, typer.Option(help="Where data and results go.")] = Path(
        "build/demo"
    ),
    steps: Annotated[int, options.count("Under each plan.")] = 322,
    batch_size: Annotated[int, options.count("Rows per step of the click job.")] = 4096,
    seed: Annotated[
        int, typer.Option(min=0, max=MOST_SEED, help="Of the model, and of the generated data.")
    ] = 0,
) -> None:
    """Train serially and pipelined, compare, break down, draw; in under three minutes."""
    from swpipe.profiler import ProfileResults

    work = find_workload(workload or (DEFAULT if all(map(find_spec, CLICKS_NEED)) else "images"))
    files = [directory / name for name in DEMO_FILES]
    pictures = [directory / name for name in DEMO_PICTURES if find_spec("matplotlib")]
    check_outputs(None, *files, pictures=pictures)
    values = {option.name: option.default for option in work.options}
    chosen = {"batch_size": batch_size, "seed": seed, "cache_dir": directory, "device": "cpu"}
    config = configured(work, {**values, **chosen}, None)
    echo(f"Training the same model ({work.name}) under both plans, in turns.")
    plans = {name: work.plans[name]() for name in ("serial", work.usual_plan)}
    with open_runs(work, config, list(plans.items()), steps) as runs:
        recorded = train_runs(runs)
        echo("\nWhat each task costs, in the plain loop and under the plan.")
        breakdown = []
        for label, pipelined in (("plain loop", False), ("under the plan", True)):
            with closing(work.open_job(config)) as job:
                opened = OpenWorkload(work, job, config.device)
                plan = plans[work.usual_plan]
                measured = profile_job(opened, plan, 1, ROUNDS, pipelined, labels=[label])
                breakdown.append(measured)
        for results in breakdown:
            echo(f"\n{format_breakdown(results)}")
        echo(f"\n{report(runs)}\nfiles:")
        both = ProfileResults(results[0] for results in breakdown)
        writes: list[Any] = [recorded.save, *(results.save for results in breakdown)]
        drawn = partial(draw, recorded, f"{work.name}, plan {work.usual_plan}")
        writes += [drawn, both.plot][: len(pictures)]
        save(None, *map(partial(Output, " "), [*files, *pictures], writes))


# ------------------------------------------------------------------------------ train and profile


@contextmanager
def open_runs(
    work: Workload, config: Any, plans: Sequence[tuple[str, PipelinePlan]], steps: int | None
) -> Iterator[list[JobRun]]:
    """One run per named plan, of the same configuration."""
    with ExitStack() as stack:
        runs = []
        for name, plan in plans:
            with about_plan(name):
                run = JobRun(name, work.open_job(config), plan, steps, config.device)
                runs.append(stack.enter_context(run))
        yield runs


def train_runs(runs: Sequence[JobRun]) -> Trace:
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


def format_outcome(tuned: Tuned, run: JobRun) -> str:
    """The interval that was predicted for a plan, that of its trial, and that of training."""
    got_us = 1e6 / run.steps_per_s
    expected, tried = (
        f"{us / 1e3:.3f} ms per step" + (f" ({got_us / us - 1:+.1%})" if us else "")
        for us in (tuned.chosen.predicted_us, tuned.chosen.interval_us)
    )
    return f"auto: expected {expected}, tried {tried}, got {got_us / 1e3:.3f}"


def named_plan(opened: OpenWorkload, name: str) -> PipelinePlan:
    """The plan of that name, a workload's own or from a file; auto makes one by trial."""
    if name != AUTO:
        return load_plan(name, opened.plans)
    tuned = opened.tune()
    echo(f"auto: {tuned.format()}")
    return tuned.plan


def record_job(opened: OpenWorkload, plan: PipelinePlan, steps: int) -> Trace:
    """Run a few steps of a job under a plan; record those after them, and the loader's calls."""
    batches = opened.pulled(_WARM_UP + steps)
    tasks, context = opened.job.tasks(), context_of(opened.job)
    with SWPipeline(plan, tasks, device=opened.device, context=context) as pipe:
        pipe.run(islice(batches, _WARM_UP))
        with pipe.trace() as recorded:
            pipe.run(batches)
    return recorded


def draw(recorded: Trace, what: str, path: Path) -> None:
    """Draw a few iterations of a timeline's steady state."""
    interval_s = recorded.initiation_interval_s
    each = "" if interval_s is None else f": {in_ms(1e6 * interval_s)} per iteration"
    recorded.steady().plot(path, title=f"{plain(what)}{each}")


def profile_job(
    opened: OpenWorkload,
    plan: PipelinePlan,
    batches: int,
    rounds: int,
    pipelined: bool,
    labels: Sequence[str] | None = None,
    seconds: float | None = None,
) -> ProfileResults:
    """Measure the tasks of a job under a plan, or in a plain loop."""
    from swpipe.profiler import TaskProfiler

    tasks, context = opened.job.tasks(), context_of(opened.job)
    with SWPipeline(plan, tasks, device=opened.device, context=context) as pipe:
        return TaskProfiler(pipe).profile_many(
            opened.take(batches),
            num_rounds=rounds,
            pipelined=pipelined,
            verbose=True,
            seconds=seconds,
            labels=labels,
            loader=loader_of(opened.job),
        )


def format_breakdown(results: ProfileResults) -> str:
    """One batch in full, or several side by side."""
    return results[0].format_report() if len(results) == 1 else results.format_report()


def numbered(names: Sequence[str]) -> list[str]:
    """The names as they are printed; of equal ones the second is "serial (2)"."""
    return [
        plain(name) + (f" ({earlier + 1})" if (earlier := names[:k].count(name)) else "")
        for k, name in enumerate(names)
    ]
