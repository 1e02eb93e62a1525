"""The commands of ``swpipe``, except ``swpipe plan``."""

from __future__ import annotations

import json
import sys
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
from swpipe.cli.options import DEFAULT
from swpipe.cli.runs import JobRun, report_of, train_in_turns
from swpipe.cli.user_errors import UserError, about_plan, echo, exit_code
from swpipe.cli.user_inputs import (
    AUTO,
    PIPELINED,
    SERIAL,
    Job,
    Opened,
    check_outputs,
    load_file,
    load_timeline,
    save,
)
from swpipe.core.messages import in_bytes, in_ms, plain
from swpipe.core.plan import PipelinePlan
from swpipe.device import resolve
from swpipe.planning.simulation.simulator import peak_of
from swpipe.profiler import ProfileResult, ProfileResults, TaskProfiler
from swpipe.profiler.result_text import LEGEND
from swpipe.trace import Trace
from swpipe.tuning.autotuning import Tuned

if TYPE_CHECKING:
    from swpipe.reporting import StepReport

ROUNDS = 4  # visits to each task
_DEMO_PROFILES_S = 5.0  # seconds of each of the two profiles of the demo

DEMO_FILES = ("timeline.json", "breakdown-serial.json", "breakdown-pipelined.json")
DEMO_PICTURES = ("timeline.png", "breakdown.png")

app = typer.Typer(
    help="Software pipelining for PyTorch: train a loop, measure it, plan it, look at it.",
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
            f"{context.invoked_subcommand} runs in one process: under torchrun there are {there}; "
            "start this command without torchrun"
        )


@app.command("train")
def train(
    context: typer.Context,
    workload: options.Workload = DEFAULT,
    plan: options.Plan = "",
    compare: Annotated[
        str, typer.Option(metavar="PLAN,PLAN", help="Train under each of these, and compare.")
    ] = "",
    steps: options.Steps = None,
    timeline: Annotated[
        Path | None, options.file("OUT.json", "Record the last steps; for Perfetto or `trace`.")
    ] = None,
    device: options.Device = None,
) -> None:
    """Train the image model, or a loop of yours."""
    if plan and compare:
        raise UserError("--plan and --compare are both given: give one of them")
    check_outputs(context, timeline)
    opened = Opened(context, workload, device, (compare or plan).split(","))
    with open_runs(opened, steps) as runs:
        recorded = train_in_turns(runs)
        echo(report_of(runs))
        if opened.tuned is not None:
            echo(format_outcome(opened.tuned, runs[opened.plans.index(AUTO)]))
        what = f"timeline of the last steps under {runs[-1].name}:"
        save(context, what, timeline, recorded.save)


@app.command("profile")
def profile(
    context: typer.Context,
    workload: options.Workload = DEFAULT,
    plan: options.Plan = "",
    serially: Annotated[
        bool, typer.Option("--serially", help="Measure the plain loop instead of the plan.")
    ] = False,
    batches: Annotated[
        int | None,
        options.count("Batches to show side by side. Default: a sample of all.", 100),
    ] = None,
    rounds: Annotated[int, options.count("Visits to each task.", least=2)] = ROUNDS,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="S",
            help="Seconds to measure (on each of --batches), instead of --rounds.",
        ),
    ] = None,
    output: Annotated[Path | None, options.file("OUT.json", "Write the figures as JSON.")] = None,
    device: options.Device = None,
) -> None:
    """Show what each task really costs: its exposed time."""
    check_outputs(context, output)
    opened = Opened(context, workload, device, [plan])
    with about_plan(opened.plans[0]):
        under = opened.plan()
        results = profile_job(opened.job, under, batches, rounds, not serially, seconds)
        held = format_memory(opened.job, None if serially else under, results.loop or results[0])
    echo(f"{results.format_report()}\n{LEGEND}\n{held}")
    save(context, "written to", output, results.save)


@app.command("trace")
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
    save(context, "drawn into", output, partial(draw, recorded, saved.stem))


@app.command("report")
def report(
    context: typer.Context,
    workload: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function of yours that returns (tasks, batches[, context]), or "
            f"{DEFAULT}. None: find the machine's settings that keep work from overlapping.",
        ),
    ] = "",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.html", help="The page.")
    ] = Path("report.html"),
    plan: Annotated[
        str,
        typer.Option(
            metavar="pipelined|FILE.toml",
            help="The plan of the loop: pipelined, in which leading pure tasks run ahead, or a "
            "file.",
            show_default="the plain loop",
        ),
    ] = "",
    rounds: Annotated[
        int | None,
        options.count(
            "Visits to each task, and trials of each plan. Default: 5, or 3 if steps are long.",
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
            raise UserError(
                "--plan and --json are about a loop, and none is named: swpipe report "
                "module:function"
            )
        echo(format_settings(device))
        return
    check_outputs(context, output)
    page = report_job(context, workload, plan, rounds, device)
    echo(json.dumps(page.to_dict(), indent=2) if as_json else page.format())
    # With ``--json``, nothing else may be printed, so that the output can be parsed.
    save(context, "" if as_json else "written to", output, page.save)


@app.command("diff")
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


@app.command("demo")
def demo(
    context: typer.Context,
    directory: Annotated[Path, typer.Option(metavar="PATH", help="Where the results go.")] = Path(
        "build/demo"
    ),
    steps: options.Steps = None,
) -> None:
    """Train serially and pipelined, compare, break down and draw."""
    files = [directory / name for name in DEMO_FILES]
    # Without matplotlib, the demo leaves the pictures out, and says so at the end.
    pictures = [directory / name for name in DEMO_PICTURES if find_spec("matplotlib")]
    check_outputs(context, *files, pictures=pictures)
    opened = Opened(context, DEFAULT, None, [SERIAL, PIPELINED])
    echo(f"Training the same model ({DEFAULT}) under two plans, in turns: {SERIAL}, {PIPELINED}.")
    with open_runs(opened, steps) as runs:
        recorded = train_in_turns(runs)
        echo(report_of(runs))
    breakdown = []
    for label, pipelined in (("plain loop", False), ("under the plan", True)):
        echo(f"\nWhat each task costs, {label}.")
        (result,) = profile_job(
            opened.open_job(), opened.plan(PIPELINED), 1, ROUNDS, pipelined, _DEMO_PROFILES_S
        )
        breakdown.append(replace(result, batch=label))
        echo(breakdown[-1].format_report())
    echo(f"\n{LEGEND}\n\nfiles:")
    both = ProfileResults(breakdown)
    drawn = partial(draw, recorded, f"{DEFAULT}, plan {PIPELINED}")
    # The order is that of the files: timeline, two breakdowns, then pictures if there are any.
    writes: list[Any] = [recorded.save, *(result.save for result in breakdown), drawn, both.plot]
    for path, write in zip([*files, *pictures], writes, strict=False):
        save(context, " ", path, write)
    if not pictures:
        echo("no pictures: they need matplotlib: pip install 'swpipe[plot]'")


# ------------------------------------------------------------------------------ train and profile


@contextmanager
def open_runs(opened: Opened, steps: int | None) -> Iterator[list[JobRun]]:
    """Open one run per plan, each with a job of its own, and close them after the block."""
    plans = {name: opened.plan(name) for name in opened.plans}
    with ExitStack() as stack:
        runs = []
        for name in opened.plans:
            with about_plan(name):
                runs.append(JobRun(plain(name), opened.open_job(), plans[name], steps))
            stack.enter_context(runs[-1].pipe)
        yield runs


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
    job: Job,
    plan: PipelinePlan,
    batches: int | None,
    rounds: int,
    pipelined: bool,
    seconds: float | None,
) -> ProfileResults:
    """Measure the tasks of a job under a plan, or in a plain loop.

    Args:
        job: The job.
        plan: The plan.
        batches: The number of batches that are measured one by one; None to measure the loop, on a
            sample of its batches.
        rounds: The number of visits to each task, unless ``seconds`` is given.
        pipelined: Whether iterations run under the plan.
        seconds: See ``TaskProfiler.profile_many``; of the loop, the time for all of it.
    """
    with job.pipeline(plan) as pipe:
        profiler = TaskProfiler(pipe, loader=job.loader)
        about: Any = {"pipelined": pipelined, "verbose": True, "seconds": seconds}
        if batches is None:
            sample = job.sample()
            within = None if seconds else rounds
            return ProfileResults([profiler.profile_loop(sample, num_rounds=within, **about)])
        return profiler.profile_many(job.take(batches), num_rounds=rounds, **about)


def format_memory(job: Job, plan: PipelinePlan | None, result: ProfileResult) -> str:
    """Return the predicted memory of a plan, or of the plain loop, with the costs of a profile.

    On a device, a second line has what its allocator counted in this process, including parameters.
    """
    loop = job.loop()
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
    opened = Opened(context, workload, device, [] if plain_loop else [plan])
    with about_plan(plan or workload):
        return report_on(
            opened.job.loop(opened.job.sample()),
            None if plain_loop else opened.plan(),
            name=workload,
            rounds=rounds,
        )


def format_settings(device: str | None) -> str:
    """Return the settings of the machine that keep work from overlapping; no loop runs."""
    from swpipe.reporting.environment import environment_findings

    findings = environment_findings(resolve(device), None, 0)
    return "\n".join(map(str, findings)) or "no findings: the machine and its settings"
