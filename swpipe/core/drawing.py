"""A plan drawn as text: the period x task grid, and the table of its stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from swpipe.core.plan import PipelinePlan, StreamRef
from swpipe.core.resolved import ResolvedPlan

EMPTY = "."


def format_grid(
    plan: PipelinePlan,
    order: Sequence[str],
    periods: int,
    *,
    iterations: int | None = None,
    faulty: Collection[str] = (),
) -> str:
    """The iteration that each task works on in each period; ``.`` where there is none.

    Args:
        plan: Stages and groups are read from it; it need not be a valid plan.
        order: Task names, top to bottom.
        periods: How many periods to draw, from period 0.
        iterations: How many iterations the data has; None for no end.
        faulty: Tasks whose cells are marked with ``!``.
    """
    head = ["", *(f"p{period}" for period in range(periods))]
    rows = [head]
    for name in order:
        entry = plan.schedule[name]
        cells = []
        for period in range(periods):
            iteration = period - entry.stage
            exists = iteration >= 0 and (iterations is None or iteration < iterations)
            cells.append((f"{iteration}" if exists else EMPTY) + ("!" if name in faulty else ""))
        rows.append([f"{name} [{entry.thread_group}]", *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(periods + 1)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def format_stages(resolved: ResolvedPlan) -> str:
    """Stage by stage: each task's group and stream, and what it waits for, with lags."""
    from tabulate import tabulate

    waits: dict[str, list[str]] = {name: [] for name in resolved.period_order}
    for dep in resolved.dependences:
        waits[dep.consumer].append(f"{dep.producer} ({dep.lag})")
    schedule = resolved.plan.schedule
    rows = [
        (
            schedule[name].stage,
            name,
            schedule[name].thread_group,
            stream_name(schedule[name].stream),
            "yes" if schedule[name].globally_ordered else "",
            ", ".join(waits[name]),
        )
        for name in sorted(waits, key=lambda name: schedule[name].stage)
    ]
    headers = (
        "stage",
        "task",
        "thread group",
        "stream",
        "globally ordered",
        "after (lag in periods)",
    )
    return f"depth {resolved.plan.depth}\n" + tabulate(rows, headers=headers)


def stream_name(stream: StreamRef) -> str:
    """How a stream is called in print."""
    if stream is None:
        return "caller's"
    return stream if isinstance(stream, str) else f"torch.Stream({stream.stream_id})"
