"""`swpipe report`: one page on a loop."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from swpipe.cli import launched as ranks
from swpipe.cli import options
from swpipe.cli.arguments import (
    AUTO,
    MEASURED,
    OpenWorkload,
    Output,
    check_outputs,
    find_workload,
    load_plan,
    save,
)
from swpipe.cli.user_errors import about_plan, echo
from swpipe.plans.torchrec import sparse_dist


@options.takes_workload_options
def report(
    context: typer.Context,
    workload: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Of yours, that returns (tasks, batches[, context]); or a workload's name.",
        ),
    ],
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
        int, typer.Option(min=2, max=1000, help="Visits to each task, and trials of each plan.")
    ] = 5,
    **given: Any,
) -> None:
    """Say what bounds a loop, how much overlap can still gain, and what to do next."""
    from swpipe.reporting.measuring import report_on

    rank: ranks.Rank | None = context.obj
    check_outputs(rank, output)
    work = find_workload(workload, rank)
    if rank is not None:
        loaded = load_plan(plan, work.plans) if plan and work.plans and plan != AUTO else None
        rank.agree(ranks.command_facts("report", context.params, [loaded]))
    opened = OpenWorkload.of(workload, given, rank)
    with closing(opened.job), about_plan(plan or workload):
        under = load_plan(plan, opened.plans) if plan not in ("", "serial") else None
        known = {**sparse_dist.PLANS, **(opened.plans or {})}
        found = report_on(
            opened.loop(MEASURED),
            under,
            name=workload,
            ready_made={name: make() for name, make in known.items() if name != "serial"},
            rounds=rounds,
        )
    echo(found.format())
    save(rank, Output("written to", output, found.save))
