"""The command line: train the click job under any plan, compare, profile, and look at timelines.

What the user got wrong ends in one line on stderr and exit code 2; training that diverged, in one
line and exit code 1.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import torch
import typer

from swpipe.errors import PlanError
from swpipe.pipeline import SWPipeline
from swpipe.plan import PipelinePlan
from swpipe.plans.clicks import PLANS
from swpipe.task import PipelineTask
from swpipe.trace import Trace

if TYPE_CHECKING:
    from swpipe.profiler import ProfileResults
    from swpipe.tasks.clicks import ClickConfig
    from swpipe.tasks.clicks.train import TrainRun

app = typer.Typer(
    help="Software pipelining for PyTorch: train a click model, measure it, look at it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_LISTS = ("--data", "--held-out")  # options that take several values in a row
_TRACED = 12  # steps in a timeline
_TIMED = 50  # steps that a statement about speed takes


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Without the program's name; None for those of the process.

    Raises:
        SystemExit: Always: 0 when all went well, 2 when the user got something wrong.
    """
    app(args=_spread(sys.argv[1:] if args is None else args), prog_name="swpipe")


def _spread(args: Iterable[str]) -> list[str]:
    """``--data a b`` as ``--data a --data b``, which is how the parser wants it."""
    spread: list[str] = []
    option = ""  # whose values may still follow
    for arg in args:
        if arg.startswith("-"):
            option = ""
        elif option and spread[-1] != option:
            spread.append(option)
        spread.append(arg)
        option = arg if arg in _LISTS else option
    return spread


# ------------------------------------------------------------------ options

_Data = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        metavar="PATH...",
        help="Click logs in the Criteo TSV format; none: a log made up from a planted model.",
    ),
]
_HeldOut = Annotated[
    list[Path] | None,
    typer.Option("--held-out", metavar="PATH...", help="Click logs to evaluate on."),
]
_Plan = Annotated[
    str, typer.Option("--plan", metavar="serial|pipelined|FILE.toml", help="How to overlap.")
]
_BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Rows per step.")]
_Device = Annotated[str, typer.Option("--device", help="Where the model lives, in torch's words.")]
_Seed = Annotated[int, typer.Option("--seed", help="Of the model, and of a made-up log.")]
_Strict = Annotated[bool, typer.Option("--strict", help="The first malformed row is an error.")]
_Cache = Annotated[
    Path, typer.Option("--cache-dir", help="Where a made-up log is kept from run to run.")
]
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swpipe"


# ----------------------------------------------------------------- commands


@app.command("train")
def train(
    data: _Data = None,
    held_out: _HeldOut = None,
    plan: _Plan = "pipelined",
    compare: Annotated[
        str | None,
        typer.Option(metavar="PLAN,PLAN", help="Train under each of these plans, and compare."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="How many; none: once through the data.")
    ] = None,
    batch_size: _BatchSize = 2048,
    device: _Device = "cpu",
    seed: _Seed = 0,
    strict: _Strict = False,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="OUT.json", help="Record the last steps; for Perfetto or `trace`."),
    ] = None,
    cache_dir: _Cache = _CACHE,
) -> None:
    """Train the click model."""
    with _one_line_errors():
        plans = {name: _load_plan(name) for name in (compare or plan).split(",")}
        config = _config(data, held_out, batch_size, device, seed, strict, cache_dir)
        with _runs(config, plans, steps) as runs:
            recorded = _train(runs)
            _print_training(runs)
            if timeline is not None:
                _make_room(timeline)
                recorded.save(timeline)
                print(f"timeline of the last steps under {runs[-1].name}: {timeline}")


@app.command("profile")
def profile(
    data: _Data = None,
    plan: _Plan = "pipelined",
    serially: Annotated[
        bool, typer.Option("--serially", help="Measure the plain loop instead of the plan.")
    ] = False,
    batches: Annotated[int, typer.Option(min=1, help="Batches to show side by side.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of baseline and shortcuts.")] = 3,
    batch_size: _BatchSize = 2048,
    device: _Device = "cpu",
    seed: _Seed = 0,
    strict: _Strict = False,
    output: Annotated[
        Path | None, typer.Option(metavar="OUT.json", help="Write the figures as JSON.")
    ] = None,
    cache_dir: _Cache = _CACHE,
) -> None:
    """Show what each task of the click job really costs: its exposed time."""
    with _one_line_errors():
        loaded = _load_plan(plan)
        config = _config(data, None, batch_size, device, seed, strict, cache_dir)
        with _about_plan(plan):
            results = _profile(config, loaded, batches, rounds, pipelined=not serially)
        _print_breakdown(results)
        if output is not None:
            _make_room(output)
            results.save(output)
            print(f"written to {output}")


@app.command("plan")
def show_plan(
    plan: Annotated[str, typer.Argument(metavar="serial|pipelined|FILE.toml")],
    periods: Annotated[int, typer.Option(min=1, help="Periods to show.")] = 6,
    output: Annotated[
        Path | None, typer.Option(metavar="OUT.toml", help="Write the plan, as TOML or JSON.")
    ] = None,
) -> None:
    """Show a plan: which task works on which iteration when, and what waits for what."""
    with _one_line_errors():
        loaded = _load_plan(plan)
        tasks = [PipelineTask(name, lambda ctx: None) for name in loaded.schedule]
        with _about_plan(plan), SWPipeline(loaded, tasks, device="cpu") as pipe:
            print(pipe.format_schedule(periods), pipe.format_stage_analysis(), sep="\n\n")
        if output is not None:
            _make_room(output)
            loaded.save(output)
            print(f"written to {output}")


@app.command("trace")
def draw_trace(
    timeline: Annotated[Path, typer.Argument(help="JSON from `swpipe train --timeline`.")],
    output: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="PNG, SVG or PDF; default: beside it.")
    ] = None,
) -> None:
    """Draw a saved timeline."""
    with _one_line_errors():
        try:
            recorded = Trace.load(timeline)
        except OSError as error:
            raise _UserError(f"{timeline}: {error.strerror}") from error
        except ValueError as error:
            raise _UserError(f"{timeline}: {error}") from error
        picture = timeline.with_suffix(".png") if output is None else output
        _make_room(picture)
        recorded.plot(picture)
        print(recorded.format_summary())
        print(f"drawn into {picture}")


@app.command("demo")
def demo(
    directory: Annotated[Path, typer.Option(help="Where data and results go.")] = Path(
        "build/demo"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Under each plan.")] = 322,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 4096,
    seed: _Seed = 0,
) -> None:
    """Train serially and pipelined, compare, break down, draw; in under three minutes."""
    with _one_line_errors():
        config = _config(None, None, batch_size, "cpu", seed, False, directory)
        print("Training the same click model under both plans, by turns.")
        plans = {name: PLANS[name]() for name in ("serial", "pipelined")}
        with _runs(config, plans, steps) as runs:
            recorded = _train(runs)
            print("\nWhat each task costs, in the plain loop and under the plan.")
            breakdown = [
                _profile(config, plans["pipelined"], 1, 3, pipelined=pipelined)
                for pipelined in (False, True)
            ]
            files = _draw(directory, recorded, breakdown)
            print()
            for results in breakdown:
                _print_breakdown(results)
                print()
            _print_training(runs)
            print("files:", *files, sep="\n  ")


# ------------------------------------------------------------------ pieces


def _config(
    data: list[Path] | None,
    held_out: list[Path] | None,
    batch_size: int,
    device: str,
    seed: int,
    strict: bool,
    cache_dir: Path,
) -> ClickConfig:
    """The job; with a made-up log where no data is named."""
    _check_device(device)
    # Two threads, one core each: more within an operation would make them fight, and a sum that is
    # split among more threads rounds otherwise.
    torch.set_num_threads(1)
    try:
        from swpipe.tasks.clicks import ClickConfig
        from swpipe.tasks.clicks.generate import click_logs
    except ModuleNotFoundError as error:
        raise _UserError(
            f"the click job needs {error.name}: install swpipe[clicks] and TorchRec, see README.md"
        ) from error
    if data is None:
        from tqdm import tqdm

        # The bar appears only if there is something to wait for.
        with tqdm(desc="making up a click log", unit=" rows", delay=0.3) as bar:
            logs = click_logs(cache_dir, seed=seed, progress=bar.update)
        data, held_out = [logs.train], held_out or [logs.held_out]
    return ClickConfig(
        data=tuple(data),
        held_out=tuple(held_out or ()),
        batch_size=batch_size,
        device=device,
        seed=seed,
        strict=strict,
    )


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise _UserError(f"--device {device}: {str(error).splitlines()[0]}") from error


def _load_plan(name: str) -> PipelinePlan:
    """A ready-made plan by its name, or one from a file."""
    if name in PLANS:
        return PLANS[name]()
    try:
        with _about_plan(name):
            return PipelinePlan.load(name)
    except OSError as error:
        raise _UserError(
            f"plan {name}: {error.strerror}; name a file, or one of {', '.join(PLANS)}"
        ) from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _UserError(f"plan {name}: {error}") from error


@contextmanager
def _about_plan(name: str) -> Iterator[None]:
    """What is wrong with a plan is told in one line, and with the plan's name."""
    try:
        yield
    except PlanError as error:
        problems = "; ".join(problem.text for problem in error.problems)
        raise _UserError(f"plan {name}: {problems}") from error


@contextmanager
def _runs(
    config: ClickConfig, plans: Mapping[str, PipelinePlan], steps: int | None
) -> Iterator[list[TrainRun]]:
    """One run per plan, of the same config."""
    from swpipe.tasks.clicks.train import TrainRun

    with ExitStack() as stack:
        runs = []
        for name, plan in plans.items():
            with _about_plan(name):
                runs.append(stack.enter_context(TrainRun(name, config, plan, steps)))
        yield runs


def _train(runs: Sequence[TrainRun]) -> Trace:
    """Run all steps of all runs, by turns, and record the end of the last run."""
    from tqdm import tqdm

    from swpipe.tasks.clicks.train import alternate

    steps = runs[0].steps
    traced = min(steps, _TRACED)
    with tqdm(total=steps * len(runs), desc="training", unit="step") as bar:
        alternate(runs, steps - traced, on_step=bar.update)
        for run in runs:
            with run.pipe.trace() as recorded:
                run.advance(traced, bar.update)
    return recorded


def _print_training(runs: Sequence[TrainRun]) -> None:
    """Speed, loss and AUC of each run, what the first has over the others, and the data."""
    from swpipe.tasks.clicks import report
    from swpipe.tasks.clicks.train import compare, speed

    first = runs[0]
    print(report.format_runs(runs))
    for other in runs[1:]:
        if first.timed_steps >= _TIMED:
            print(report.format_speed(first, other, speed(first, other)))
        print(report.format_comparison(first, other, compare(first, other)))
    if first.job.held_out is not None:
        print(report.format_evaluation(first.job.evaluate()))
    print(f"data: {report.format_rows(first.rows)}")


def _profile(
    config: ClickConfig, plan: PipelinePlan, batches: int, rounds: int, *, pipelined: bool
) -> ProfileResults:
    from swpipe.profiler import TaskProfiler
    from swpipe.tasks.clicks import ClickJob

    job = ClickJob(config)
    with SWPipeline(plan, job.tasks(), device=config.device) as pipe:
        results: ProfileResults = TaskProfiler(pipe).profile_many(
            list(job.batches(batches)),
            num_warmup=3,
            num_measure=10,
            num_rounds=rounds,
            pipelined=pipelined,
            verbose=True,
        )
    return results


def _print_breakdown(results: ProfileResults) -> None:
    """One batch with all there is to say of it, or several side by side."""
    (results[0] if len(results) == 1 else results).print_report()


def _draw(directory: Path, recorded: Trace, breakdown: Sequence[ProfileResults]) -> list[Path]:
    """Save timeline and figures in ``directory``; draw them where matplotlib is installed."""
    from importlib.util import find_spec

    timeline = directory / "timeline.json"
    recorded.save(timeline)
    files = [timeline]
    for results in breakdown:
        files.append(directory / f"breakdown-{results[0].mode}.json")
        results.save(files[-1])
    if find_spec("matplotlib"):
        files += [timeline.with_suffix(".png"), directory / "breakdown.png"]
        recorded.plot(files[-2])
        type(breakdown[0])(results[0] for results in breakdown).plot(files[-1])
    return files


def _make_room(path: Path) -> None:
    """Make the directory that a file is to go into."""
    path.parent.mkdir(parents=True, exist_ok=True)


# ------------------------------------------------------------------ errors


class _UserError(Exception):
    """Something the user got wrong, in one line."""


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except _user_errors() as error:
        _fail(str(error), 2)
    except _diverged() as error:
        _fail(str(error), 1)


def _user_errors() -> tuple[type[Exception], ...]:
    clicks = sys.modules.get("swpipe.tasks.clicks")
    return (_UserError,) if clicks is None else (_UserError, clicks.ClickDataError)


def _diverged() -> tuple[type[Exception], ...]:
    clicks = sys.modules.get("swpipe.tasks.clicks")
    return () if clicks is None else (clicks.TrainingDivergedError,)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"swpipe: {message}", err=True)
    raise typer.Exit(code)
