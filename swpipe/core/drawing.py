"""Format a plan as text: the period x task grid, and a table of its stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from swpipe.core.messages import listed, shown
from swpipe.core.plan import PipelinePlan, StreamRef, TaskSchedule
from swpipe.core.resolved import ResolvedPlan

CALLERS_STREAM = "caller's"
"""What the caller's stream is called."""


def stream_name(stream: StreamRef) -> str:
    """The name of a stream in messages and tables."""
    if stream is None:
        return CALLERS_STREAM
    return stream if isinstance(stream, str) else f"torch.Stream({stream.stream_id})"


def group_name(entry: TaskSchedule) -> str:
    """A task's thread group, and how many workers it has."""
    return entry.thread_group + (f" x {entry.workers}" if entry.workers > 1 else "")


def format_grid(
    plan: PipelinePlan, order: Sequence[str], periods: int, *, faulty: Collection[str] = ()
) -> str:
    """A grid of the iteration that each task runs on in each period; ``.`` means none.

    Args:
        plan: A plan with valid stages; it need not be valid otherwise.
        order: Task names, from top to bottom.
        periods: The number of periods, from period 0.
        faulty: Tasks to mark with ``!``.

    Raises:
        ValueError: ``periods`` is no number of periods.
    """
    if type(periods) is not int or periods < 0:
        raise ValueError(f"periods is {shown(periods)}: give how many to show, from 0")
    rows = [["", *(f"p{period}" for period in range(periods))]]
    for name in order:
        entry, mark = plan.schedule[name], "!" if name in faulty else ""
        iterations = (period - entry.stage for period in range(periods))
        cells = [f"{i if i >= 0 else '.'}{mark}" for i in iterations]
        rows.append([f"{name} [{group_name(entry)}]", *cells])
    head, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        "  ".join([row[0].ljust(head), *map(str.rjust, row[1:], others)]).rstrip() for row in rows
    )


def format_stages(resolved: ResolvedPlan) -> str:
    """A table of tasks by stage: thread group, stream, and dependences with their lags."""
    from swpipe.core.tables import table

    waits: dict[str, list[str]] = {name: [] for name in resolved.period_order}
    for dep in resolved.dependences:
        waits[dep.consumer].append(f"{dep.producer} ({dep.lag})")
    rows = []
    for name in sorted(waits, key=lambda name: resolved.plan.schedule[name].stage):
        entry = resolved.plan.schedule[name]
        ordered = "yes" if entry.globally_ordered else ""
        stream, after = stream_name(entry.stream), ", ".join(waits[name])
        rows.append((entry.stage, name, group_name(entry), stream, ordered, after))
    titles = ("stage", "task", "thread group", "stream", "globally ordered")
    keep = resolved.plan.keep
    kept = "" if keep is None else f", keeps {listed(keep)}"
    return f"depth {resolved.plan.depth}{kept}\n" + table(
        (*titles, "after (lag in periods)"), rows, left=range(1, 6)
    )
