"""Format a plan as text: the period x task grid, and a table of its stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from swpipe.core.messages import listed, shown
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
    """A grid of the iteration that each task runs on in each period; ``.`` means none.

    Args:
        plan: A plan with valid stages; it need not be valid otherwise.
        order: Task names, from top to bottom.
        periods: The number of periods, from period 0.
        iterations: The number of iterations; None for no limit.
        faulty: Tasks to mark with ``!``.

    Raises:
        ValueError: ``periods`` is no number of periods.
    """
    if type(periods) is not int or periods < 0:
        raise ValueError(f"periods is {shown(periods)}: give how many to show, from 0")
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
    """A table of tasks by stage: thread group, stream, and dependences with their lags."""
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
    headers = ["stage", "task", "thread group", "stream", "globally ordered"]
    headers.append("after (lag in periods)")
    keep = resolved.plan.keep
    kept = "" if keep is None else f", keeps {listed(keep)}"
    return f"depth {resolved.plan.depth}{kept}\n" + tabulate(rows, headers=headers)


CALLERS_STREAM = "caller's"
"""What the caller's stream is called."""


def stream_name(stream: StreamRef) -> str:
    """The name of a stream in messages and tables."""
    if stream is None:
        return CALLERS_STREAM
    return stream if isinstance(stream, str) else f"torch.Stream({stream.stream_id})"
