"""`swpipe plan`: infer dependences, check plans, simulate them, choose one, show one.

The commands also run on several ranks: all do the same, and rank 0 writes the files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated

import typer

from swpipe.analysis import verify
from swpipe.cli import options
from swpipe.cli.options import DEFAULT
from swpipe.cli.user_errors import UserError, about_plan, echo
from swpipe.cli.user_inputs import (
    TUNING_S,
    Opened,
    check_outputs,
    load_file,
    load_timeline,
    save,
)
from swpipe.core.costs import CostModel
from swpipe.core.messages import plain
from swpipe.core.plan import MOST_ITERATIONS
from swpipe.core.task import PipelineTask
from swpipe.pipeline import SWPipeline
from swpipe.planning import Limits, auto_plan, lower_bounds
from swpipe.planning import simulate as simulate_plan
from swpipe.trace import Trace, format_stacked, plot_stacked
from swpipe.tuning.autotuning import EFFORT

app = typer.Typer(
    help="Infer dependences; check, simulate, choose or show a plan.",
    rich_markup_mode=None,
)

PlanName = Annotated[
    str, typer.Argument(metavar="PLAN", help="serial, pipelined, or FILE.toml or .json.")
]
Costs = Annotated[
    Path | None,
    options.file("COSTS.json", "Costs of the tasks. Default: measured on the workload."),
]
KeepCosts = Annotated[
    Path | None,
    typer.Option("--keep-costs", metavar="OUT.json", help="Write the costs that were used."),
]
Frozen = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TASK,TASK", help="Tasks to keep in the last stage, on the caller's thread."
    ),
]
MaxBytes = Annotated[
    int | None,
    typer.Option(
        min=1, max=2**63 - 1, metavar="BYTES", help="Memory limit; needs --costs with memory."
    ),
]
PlanFile = Annotated[Path | None, options.file("OUT.toml", "Write the plan, as TOML or JSON.")]


@app.command("show")
def show(
    context: typer.Context,
    plan: PlanName,
    workload: options.Workload = DEFAULT,
    periods: Annotated[int, options.count("Periods to show.", 100)] = 6,
    output: PlanFile = None,
) -> None:
    """Show a plan: what works when, and what waits for what."""
    check_outputs(context, output)
    loaded = Opened(context, workload, None, [plan]).plan()
    # Tasks that do nothing suffice to validate a plan and to show its schedule.
    tasks = [PipelineTask(name, lambda ctx: None) for name in loaded.schedule]
    with about_plan(plan), SWPipeline(loaded, tasks, device="cpu") as pipe:
        streams = loaded.names_streams
        kind = "a device with streams" if streams else "the CPU"
        echo(f"{pipe.format_schedule(periods)}\n\n{pipe.format_stage_analysis()}")
        echo(f"\nprogram for {kind}:\n{pipe.format_program(streams=streams)}")
    save(context, "written to", output, loaded.save)


@app.command("infer")
def infer(
    context: typer.Context,
    workload: options.Workload = DEFAULT,
    plan: Annotated[
        str, typer.Option(metavar="PLAN", help="Compare with what this plan declares.")
    ] = "",
    output: PlanFile = None,
    device: options.Device = None,
) -> None:
    """Record what each task touches; infer the dependences."""
    check_outputs(context, output)
    opened = Opened(context, workload, device, [plan] if plan else [])
    with about_plan(plan or workload):
        loop = opened.job.loop()
        recording = loop.record()
        echo(recording.report(opened.plan() if plan else None))
        inferred = loop.inferred_plan(recording)
    save(context, "written to", output, inferred.save)


@app.command("check")
def check(
    context: typer.Context,
    plan: PlanName,
    workload: options.Workload = DEFAULT,
    budget: Annotated[
        int | None,
        typer.Option(min=1, max=2**63 - 1, metavar="BYTES", help="What may be in flight at most."),
    ] = None,
    device: options.Device = None,
) -> None:
    """Check that a plan gives the same numbers in every interleaving."""
    opened = Opened(context, workload, device, [plan])
    with about_plan(plan):
        loop = opened.job.loop()
        recording = loop.record()
        loaded = opened.plan()
        # The recording has found the state to restore, so measuring memory need not find it again.
        loop = replace(loop, state=recording.owners)
        # ``keep`` matters here: memory that the plan does not keep is freed earlier.
        memory = loop.measure_memory(loaded.keep, recording.effects)
        # A violated order raises a PlanError, which ``about_plan`` reports in one line. What
        # follows is printed only if all orders are kept.
        verified = verify(loaded, loop.tasks, recording.effects, memory=memory, budget_bytes=budget)
    echo(f"{plain(plan)}: all {verified.orders} orders are kept in every interleaving")
    if verified.footprint is not None:
        echo(verified.footprint.format())


@app.command("simulate")
def simulate(
    context: typer.Context,
    plan: PlanName,
    costs: Costs = None,
    workload: options.Workload = DEFAULT,
    measured: Annotated[
        Path | None, options.file("TIMELINE.json", "What was measured; shown below.")
    ] = None,
    picture: Annotated[
        Path | None, options.file("OUT.png", "Draw the timeline: PNG, SVG or PDF.")
    ] = None,
    keep: KeepCosts = None,
    device: options.Device = None,
) -> None:
    """Predict a plan's timeline and interval from its tasks' costs."""
    check_outputs(context, keep, pictures=[picture])
    opened = Opened(context, workload, device, [plan])
    loaded = opened.plan()
    # With given costs, no task has to run.
    if costs is not None:
        model, streams = _costs(costs)
    else:
        loop = opened.job.loop(opened.job.sample())
        # Costs are measured under the plan itself, whose tasks slow each other down.
        model = replace(loop.measure(loaded), memory=loop.measure_memory())
        streams = loop.has_streams
    with about_plan(plan):
        result = simulate_plan(loaded, model, streams=streams)
        bounds = lower_bounds(loaded, model, streams=streams)
    traces = {"predicted": result.trace()}
    if measured is not None:
        whole = load_timeline(measured)
        # The prediction has a few iterations, so the same number is shown of the measured timeline.
        traces["measured"] = last_iterations(whole, result.iterations)
    # Narrower, a timeline is unreadable; wider, its lines get too long to follow.
    width = min(max(get_terminal_size().columns, 60), 200)
    echo(f"{format_stacked(traces, width)}\n\n{result.format()}\n\n{bounds.format()}")
    save(context, "drawn into", picture, lambda path: plot_stacked(traces, path))
    save(context, "costs written to", keep, model.save)


@app.command("auto")
def auto(
    context: typer.Context,
    plan: Annotated[
        str,
        typer.Argument(metavar="PLAN", help="Source of the dependences. Default: the workload."),
    ] = "",
    costs: Costs = None,
    workload: options.Workload = DEFAULT,
    in_flight: Annotated[int, options.count("Iterations in flight at most.", MOST_ITERATIONS)] = 5,
    groups: Annotated[int, options.count("Thread groups at most.", MOST_ITERATIONS)] = 4,
    frozen: Frozen = None,
    seconds: Annotated[
        float,
        typer.Option(min=1, metavar="S", help="Seconds to measure, about, without a PLAN."),
    ] = TUNING_S,
    max_bytes: MaxBytes = None,
    keep: KeepCosts = None,
    output: PlanFile = None,
    device: options.Device = None,
) -> None:
    """Choose the best plan under limits, and say why."""
    check_outputs(context, keep, output)
    opened = Opened(context, workload, device, [plan] if plan else [])
    # The option may be repeated, and each value may list several tasks.
    kept = tuple(name for text in frozen or () for name in text.split(",") if name)
    limits = Limits(in_flight=in_flight, groups=groups, frozen=kept, max_bytes=max_bytes)
    # Without a plan, everything is measured; with a plan, nothing is, so costs must be given.
    if not plan:
        if costs is not None:
            raise UserError(
                "--costs is given without a plan, whose dependences are needed: swpipe plan auto "
                "PLAN --costs COSTS.json"
            )
        tuned = opened.job.tune(limits, seconds)
        # Both branches set ``text``, ``chosen`` and ``model``, which are printed and saved at the
        # end.
        text = tuned.format()
        chosen = tuned.plan
        model = tuned.costs
    else:
        if costs is None:
            raise UserError(
                f"plan {plain(plan)} is given without the costs of its tasks: give --costs "
                "COSTS.json, or name no plan, and the workload is measured"
            )
        loaded = opened.plan()
        model, streams = _costs(costs)
        with about_plan(plan):
            # The planner's time grows with the number of tasks, so large plans get less effort.
            effort = EFFORT if len(loaded.schedule) <= 20 else 1.0
            choice = auto_plan(loaded, model, limits=limits, streams=streams, effort=effort)
        text = choice.format()
        chosen = choice.plan
    echo(text)
    save(context, "written to", output, chosen.save)
    save(context, "costs written to", keep, model.save)


def _costs(path: Path) -> tuple[CostModel, bool]:
    """Load costs, and return them with whether they are those of a device with streams."""
    model = load_file(CostModel.load, path, "costs ")
    # Device time exists only on a device with streams, so the file need not say it.
    return model, any(cost.device_us for cost in model.tasks.values())


def last_iterations(trace: Trace, count: int) -> Trace:
    """Return the last ``count`` iterations of a trace."""
    numbers = sorted({span.iteration for span in trace.spans})
    return trace.window(numbers[max(0, len(numbers) - count)], numbers[-1])
