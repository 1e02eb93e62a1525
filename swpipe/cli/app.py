"""The commands of ``swpipe``, except ``swpipe plan``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

import swpipe
from swpipe.cli import launched as ranks
from swpipe.cli import options, plan_commands
from swpipe.cli.user_errors import UserError, about_plan, echo, exit_code
from swpipe.cli.user_inputs import (
    SERIAL,
    Opened,
    Output,
    check_outputs,
    load_file,
    load_timeline,
    save,
)
from swpipe.core.messages import in_bytes, in_ms, plain
from swpipe.core.plan import PipelinePlan
from swpipe.core.progress import progress_bar
from swpipe.device import resolve
from swpipe.planning.simulation.simulator import peak_of
from swpipe.profiler import ProfileResult, ProfileResults, TaskProfiler
from swpipe.profiler.result_text import LEGEND
from swpipe.tasks import job_run
from swpipe.tasks.job_run import JobRun, alternate
from swpipe.tasks.workload import DEFAULT, MOST_COUNT
from swpipe.trace import Trace
from swpipe.tuning.autotuning import Tuned

if TYPE_CHECKING:
    from swpipe.reporting import StepReport

_TRACED = 12  # steps in a timeline
_TURN = 100  # steps under one plan before the next plan's turn
ROUNDS = 4  # visits to each task

_UNTIMED = 10  # steps of each run before its turns

# The demo trains and profiles for this long; a profile ends when its intervals are narrow. Seconds
# of training under each of two plans, number of turns, and least steps of a turn.
_DEMO_TRAINS_S = 6.0
_DEMO_TURNS = 5
_DEMO_TURN = 30
# Seconds of each of two profiles, and the interval to reach as a fraction of an iteration.
_DEMO_PROFILES_S = 5.0
_DEMO_SPREAD = 0.05

DEMO_FILES = ("timeline.json", "breakdown-serial.json", "breakdown-pipelined.json")
DEMO_PICTURES = ("timeline.png", "breakdown.png")

app = typer.Typer(
    help="Software pipelining for PyTorch: train a model, measure it, plan it, look at it.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(plan_commands.app, name="plan")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: The arguments without the program's name; None for those of the process.

    Raises:
        SystemExit: Always: 0 on success, 2 for a mistake of the user.
    """
    given = [*(sys.argv[1:] if args is None else args)] or ["--help"]
    # ``standalone_mode=False`` lets click raise its exceptions, so that they are reported in one
    # line.
    run = partial(app, args=given, prog_name="swpipe", standalone_mode=False)
    # Under torchrun, all ranks have to be joined before the command starts, so that a mistake found
    # by one rank ends all of them.
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
    """Refuse commands that make no sense on several ranks."""
    if context.obj is not None and context.invoked_subcommand not in ranks.COMMANDS:
        there = ", ".join(ranks.COMMANDS)
        raise UserError(
            f"{context.invoked_subcommand}: under torchrun there are {there}; "
            "start this one without it"
        )


@app.command("train", cls=options.Command)
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
    device: options.Device = None,
) -> None:
    """Train the image model, another workload, or a loop of yours."""
    if plan and compare:
        raise UserError("--plan and --compare: give one of them")
    check_outputs(context, timeline)
    # The job with which a plan is made is closed before the runs open jobs of their own.
    with Opened(context, workload, device, (compare or plan).split(","), auto=True) as opened:
        plans = [opened.plan(name) for name in opened.plans]
    labelled = list(zip(numbered(opened.plans), plans, strict=True))
    with open_runs(opened, labelled, steps) as runs:
        recorded = train_runs(runs)
        echo(job_run.report(runs))
        if opened.tuned is not None:
            echo(format_outcome(opened.tuned, runs[opened.plans.index("auto")]))
        what = f"timeline of the last steps under {runs[-1].name}:"
        save(context, Output(what, timeline, recorded.save))


@app.command("profile", cls=options.Command)
def profile(
    context: typer.Context,
    workload: options.Workload = DEFAULT,
    plan: options.Plan = "",
    serially: Annotated[
        bool, typer.Option("--serially", help="Measure the plain loop instead of the plan.")
    ] = False,
    batches: Annotated[
        int | None,
        options.count("Batches to show side by side; none: a sample of all.", 100),
    ] = None,
    rounds: Annotated[int, options.count("Visits to each task.", least=2)] = ROUNDS,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="S",
            help="Measure for so long (on each of --batches), instead of --rounds.",
        ),
    ] = None,
    output: Annotated[Path | None, options.file("OUT.json", "Write the figures as JSON.")] = None,
    device: options.Device = None,
) -> None:
    """Show what each task really costs: its exposed time."""
    check_outputs(context, output)
    with (
        Opened(context, workload, device, [plan], auto=True) as opened,
        about_plan(opened.plans[0]),
    ):
        under = opened.plan()
        results = profile_job(opened, under, batches, rounds, not serially, seconds=seconds)
        held = format_memory(opened, None if serially else under, results.loop or results[0])
    echo(f"{results.format_report()}\n{LEGEND}\n{held}")
    save(context, Output("written to", output, results.save))


@app.command("trace", cls=options.Command)
def draw_trace(
    context: typer.Context,
    saved: Annotated[
        Path, typer.Argument(metavar="TIMELINE.json", help="From `swpipe train --timeline`.")
    ],
    output: Annotated[
        Path | None, options.file("OUT.png", "PNG, SVG or PDF; default: beside the timeline.")
    ] = None,
) -> None:
    """Draw a saved timeline, and print what each thread and stream did."""
    # Without matplotlib, a picture that was not asked for is left out.
    if output is None and find_spec("matplotlib"):
        output = saved.with_suffix(".png")
    recorded = load_timeline(saved)
    check_outputs(context, pictures=[output])
    echo(recorded.format_summary())
    save(context, Output("drawn into", output, partial(draw, recorded, saved.stem)))


@app.command("report", cls=options.Command)
def report(
    context: typer.Context,
    workload: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help=f"Of yours, that returns (tasks, batches[, context]); or {DEFAULT}. None: find "
            "what in the machine's settings keeps work from overlapping.",
        ),
    ] = "",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.html", help="The page.")
    ] = Path("report.html"),
    plan: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE.toml",
            help="What the loop runs under: a ready-made plan of the workload, or a file.",
            show_default="the plain loop",
        ),
    ] = "",
    rounds: Annotated[
        int | None,
        options.count(
            "Visits to each task, and trials of each plan; none: 5, or 3 where steps are long.",
            1000,
            least=2,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for tools.")] = False,
    device: options.Device = None,
) -> None:
    """Say what bounds a loop, the most to gain, and what to do next."""
    if not workload:
        if plan or as_json:
            raise UserError("--plan and --json: name the workload, too")
        echo(format_settings(device))
        return
    check_outputs(context, output)
    page = report_job(context, workload, plan, rounds, device)
    echo(json.dumps(page.to_dict(), indent=2) if as_json else page.format())
    # With ``--json``, nothing else may be printed, so that the output can be parsed.
    save(context, Output("written to", output, page.save), quiet=as_json)


@app.command("diff", cls=options.Command)
def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE.json", help="From `swpipe profile`.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER.json", help="The same, later.")],
) -> None:
    """Compare two saved profiles; exit with 1 if the later is slower.

    A difference within its 95% interval does not count.
    """
    profiles = [load_file(ProfileResults.load, path) for path in (before, after)]
    try:
        changes = profiles[0].diff(profiles[1])
    except ValueError as error:
        raise UserError(f"diff: {error}") from error
    for path, results in zip((before, after), profiles, strict=True):
        clauses = (each.measurement.disturbance for each in results)
        for clause in [clause for clause in clauses if clause][:1]:
            echo(f"{plain(str(path))}: {clause}")
    echo("\n\n".join(map(str, changes)))
    # The exit code lets a script or CI test for a regression.
    if any(each.iteration.verdict == "longer" for each in changes):
        raise typer.Exit(1)


@app.command("demo", cls=options.Command)
def demo(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Option(metavar="PATH", help="Where data and results go.")
    ] = Path("build/demo"),
    steps: Annotated[
        int | None, options.count("Under each plan; none: as many as take a few seconds.")
    ] = None,
) -> None:
    """Train serially and pipelined, compare, break down and draw."""
    files = [directory / name for name in DEMO_FILES]
    # Without matplotlib, the demo leaves the pictures out, and says so at the end.
    pictures = [directory / name for name in DEMO_PICTURES if find_spec("matplotlib")]
    check_outputs(context, *files, pictures=pictures)
    opening = partial(Opened, context, DEFAULT, "cpu", [""])
    opened = opening()
    work = opened.workload
    plans = {name: work.plans[name]() for name in (SERIAL, work.usual_plan)}
    echo(f"Training the same model ({work.name}) under two plans, in turns: {', '.join(plans)}.")
    # Without ``--steps``, the time limits of the demo decide, not the number of steps.
    most = MOST_COUNT if steps is None else steps
    with open_runs(opened, list(plans.items()), most) as runs:
        recorded = train_runs(runs, None if steps else _DEMO_TRAINS_S)
        echo(job_run.report(runs))
        interval_ms = 1e3 / max(run.steps_per_s for run in runs)
    breakdown = []
    for label, pipelined in (("plain loop", False), ("under the plan", True)):
        echo(f"\nWhat each task costs, {label}.")
        with opening() as opened:
            (result,) = profile_job(
                opened,
                opened.plan(),
                1,
                ROUNDS,
                pipelined,
                seconds=_DEMO_PROFILES_S,
                # The spread is relative to the fastest run, so that slow machines do not profile
                # longer.
                target_spread_ms=_DEMO_SPREAD * interval_ms,
            )
        breakdown.append(replace(result, batch=label))
        echo(breakdown[-1].format_report())
    echo(f"\n{LEGEND}\n\nfiles:")
    both = ProfileResults(breakdown)
    drawn = partial(draw, recorded, f"{work.name}, plan {work.usual_plan}")
    # The order is that of the files: timeline, two breakdowns, then pictures if there are any.
    writes: list[Any] = [recorded.save, *(result.save for result in breakdown)]
    writes += [drawn, both.plot][: len(pictures)]
    save(context, *map(partial(Output, " "), [*files, *pictures], writes))
    if not pictures:
        echo("no pictures: they need matplotlib: pip install 'swpipe[plot]'")


# ------------------------------------------------------------------------------ train and profile


@contextmanager
def open_runs(
    opened: Opened, plans: Sequence[tuple[str, PipelinePlan]], steps: int | None
) -> Iterator[list[JobRun]]:
    """Open one run per named plan, each with a job of its own, and close them after the block."""
    with ExitStack() as stack:
        runs = []
        for name, plan in plans:
            with about_plan(name):
                runs.append(stack.enter_context(JobRun(name, opened.open_job(), plan, steps)))
        yield runs


def train_runs(runs: Sequence[JobRun], seconds: float | None = None) -> Trace:
    """Run steps of all runs alternately, and record the end of the last run.

    Args:
        runs: Runs of the same length.
        seconds: Run as many steps as take each run about this long; None for all of their steps.
    """
    steps = runs[0].steps
    turn = _TURN
    warm_up = _UNTIMED
    traced = min(steps, _TRACED)
    with progress_bar("training", " steps", None if seconds else steps * len(runs)) as bar:
        # The step time is measured, because it determines how many steps fit into a turn.
        if seconds:
            for _ in range(2):  # the first pass loads and allocates
                begin_s = time.monotonic()
                warm_up = 0
                alternate(runs, _UNTIMED, warm_up=_UNTIMED, on_step=bar.update)
            step_s = (time.monotonic() - begin_s) / (_UNTIMED * len(runs))
            turn = max(_DEMO_TURN, round(seconds / _DEMO_TURNS / step_s))
            steps = traced + _DEMO_TURNS * turn
        # Runs alternate in turns, so that a machine whose speed drifts favours none of them.
        alternate(runs, steps - traced, chunk=turn, warm_up=warm_up, on_step=bar.update)
        # The recorded steps are not timed: recording slows them down.
        for run in runs:
            with run.pipe.trace() as recorded:
                run.advance(traced, bar.update, timed=False)
    return recorded


def format_outcome(tuned: Tuned, run: JobRun) -> str:
    """Return a line with a plan's predicted interval, that of its trial, and that of training."""
    got_us = 1e6 / run.steps_per_s
    expected, tried = (
        f"{us / 1e3:.3f} ms per step" + (f" ({got_us / us - 1:+.1%})" if us else "")
        for us in (tuned.chosen.predicted_us, tuned.chosen.interval_us)
    )
    return f"auto: expected {expected}, tried {tried}, got {got_us / 1e3:.3f}"


def draw(recorded: Trace, what: str, path: Path) -> None:
    """Draw a few iterations of a timeline's steady state."""
    interval_s = recorded.initiation_interval_s
    each = "" if interval_s is None else f": {in_ms(1e6 * interval_s)} per iteration"
    recorded.steady().plot(path, title=f"{plain(what)}{each}")


def profile_job(
    opened: Opened,
    plan: PipelinePlan,
    batches: int | None,
    rounds: int,
    pipelined: bool,
    *,
    seconds: float | None = None,
    target_spread_ms: float | None = None,
) -> ProfileResults:
    """Measure the tasks of a job under a plan, or in a plain loop.

    Args:
        opened: The job.
        plan: The plan.
        batches: The number of batches that are measured one by one; None to measure the loop, on a
            sample of its batches.
        rounds: The number of visits to each task, unless one of the next two is given.
        pipelined: Whether iterations run under the plan.
        seconds: See ``TaskProfiler.profile_many``; of the loop, the time for all of it.
        target_spread_ms: See ``TaskProfiler.profile_many``.
    """
    with opened.pipeline(plan) as pipe:
        profiler = TaskProfiler(pipe, loader=opened.loader)
        about: Any = {"pipelined": pipelined, "verbose": True, "seconds": seconds}
        if batches is None:
            sample = opened.measured()
            within = None if seconds else rounds
            return ProfileResults([profiler.profile_loop(sample, num_rounds=within, **about)])
        return profiler.profile_many(
            opened.take(batches), num_rounds=rounds, target_spread_ms=target_spread_ms, **about
        )


def format_memory(opened: Opened, plan: PipelinePlan | None, result: ProfileResult) -> str:
    """Return the predicted memory of a plan, or of the plain loop, with the costs of a profile.

    On a device, a second line has what its allocator counted in this process, including parameters.
    """
    loop = opened.loop()
    costs = replace(result.costs, memory=loop.measure_memory())
    plan = PipelinePlan.serial(loop.tasks) if plan is None else plan
    held = peak_of(plan, costs, streams=loop.has_streams)
    lines = [] if held is None else [held.format()]
    # The allocator's figures include parameters and fragments, which the simulator does not count.
    if loop.has_streams:
        most = (torch.accelerator.max_memory_allocated, torch.accelerator.max_memory_reserved)
        allocated, reserved = (in_bytes(count()) for count in most)
        lines.append(f"the device's allocator: at most {allocated} allocated, {reserved} reserved")
    return "\n".join(lines)


def report_job(
    context: typer.Context, workload: str, plan: str, rounds: int | None, device: str | None
) -> StepReport:
    """Measure a workload under a named plan, and return the report on it."""
    # Imported here, since the other commands start faster without it.
    from swpipe.reporting.measuring import report_on

    # The serial plan is the same as no plan: the report is then about the plain loop.
    plain_loop = plan in ("", SERIAL)
    with (
        Opened(context, workload, device, [] if plain_loop else [plan]) as opened,
        about_plan(plan or workload),
    ):
        return report_on(
            opened.loop(opened.measured()),
            None if plain_loop else opened.plan(),
            name=workload,
            rounds=rounds,
        )


def format_settings(device: str | None) -> str:
    """Return what in the machine's settings keeps work from overlapping; no loop runs."""
    from swpipe.reporting.environment import environment_findings

    findings = environment_findings(resolve(device), None, 0)
    return "\n".join(map(str, findings)) or "no findings: the machine and its settings"


def numbered(names: Sequence[str]) -> list[str]:
    """Return the names for printing; a repeated name gets a number, as in "serial (2)"."""
    return [
        plain(name) + (f" ({earlier + 1})" if (earlier := names[:k].count(name)) else "")
        for k, name in enumerate(names)
    ]
