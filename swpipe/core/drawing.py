"""Plans as text: the period x task grid, and a table of stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from swpipe.core.messages import listed, shown
from swpipe.core.plan import PipelinePlan, StreamRef, TaskSchedule
from swpipe.core.resolved import ResolvedPlan

CALLERS_STREAM = "caller's"
"""The name of the caller's stream in messages and tables."""


def stream_name(stream: StreamRef) -> str:
    """Return the name of a stream in messages and tables."""
    if stream is None:
        return CALLERS_STREAM
    return stream if isinstance(stream, str) else f"torch.Stream({stream.stream_id})"


def group_name(entry: TaskSchedule) -> str:
    """Return a task's thread group, with the number of its workers if there are several."""
    return entry.thread_group + (f" x {entry.workers}" if entry.workers > 1 else "")


def format_grid(
    plan: PipelinePlan, order: Sequence[str], periods: int, *, faulty: Collection[str] = ()
) -> str:
    """Return a grid of the iteration that each task runs on in each period; ``.`` means none.

    Args:
        plan: A plan with valid stages; it need not be valid otherwise.
        order: Task names, from top to bottom.
        periods: The number of periods to show, from period 0.
        faulty: Tasks to mark with ``!``.

    Raises:
        ValueError: ``periods`` is no number of periods.
    """
    if type(periods) is not int or periods < 0:
        raise ValueError(f"periods is {shown(periods)}: give how many to show, from 0")
    rows = [["", *(f"p{period}" for period in range(periods))]]
    for name in order:
        entry = plan.schedule[name]
        mark = "!" if name in faulty else ""
        # Task t works in period p on iteration p - s(t); before its stage, it has none.
        iterations = (period - entry.stage for period in range(periods))
        cells = [f"{i if i >= 0 else '.'}{mark}" for i in iterations]
        rows.append([f"{name} [{group_name(entry)}]", *cells])
    # The widest cell of a column is its width; task names are on the left, numbers on the right.
    head, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        "  ".join([row[0].ljust(head), *map(str.rjust, row[1:], others)]).rstrip() for row in rows
    )


def format_stages(resolved: ResolvedPlan) -> str:
    """Return a table of tasks by stage: thread group, stream, and dependences with their lags."""
    from swpipe.core.tables import table

    waits: dict[str, list[str]] = {name: [] for name in resolved.period_order}
    for dep in resolved.dependences:
        waits[dep.consumer].append(f"{dep.producer} ({dep.lag})")
    rows = []
    # The sort is stable: within a stage, tasks stay in the order of the period.
    for name in sorted(waits, key=lambda name: resolved.plan.schedule[name].stage):
        entry = resolved.plan.schedule[name]
        ordered = "yes" if entry.globally_ordered else ""
        stream = stream_name(entry.stream)
        after = ", ".join(waits[name])
        rows.append((entry.stage, name, group_name(entry), stream, ordered, after))
    titles = ("stage", "task", "thread group", "stream", "globally ordered")
    # Depth and keep belong to the whole plan, so they stand above the table.
    keep = resolved.plan.keep
    keeps = "" if keep is None else f", keeps {listed(keep)}"
    return f"depth {resolved.plan.depth}{keeps}\n" + table(
        (*titles, "after (lag in periods)"), rows, left=range(1, 6)
    )
