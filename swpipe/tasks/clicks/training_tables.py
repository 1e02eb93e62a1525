"""The results of training, as text and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from swpipe.core.tables import table
from swpipe.tasks.clicks.compare import Comparison, Speed, compare, speed
from swpipe.tasks.clicks.feed import Evaluation
from swpipe.tasks.clicks.train import RowCount, TrainRun

_TIMED = 50  # steps below which no speed is reported


def format_training(runs: Sequence[TrainRun[Any]], more: Sequence[str] = ()) -> str:
    """Speed, loss and AUC of each run, how the others differ from the first, and the data.

    ``more`` comes before the data. A collective.
    """
    first = runs[0]
    parts = [format_runs(runs)]
    for other in runs[1:]:
        if first.timed_steps >= _TIMED:
            parts.append(format_speed(first, other, speed(first, other)))
        parts.append(format_comparison(first, other, compare(first, other)))
    return "\n".join([*parts, *more, f"data: {format_rows(first.all_rows())}"])


def format_runs(runs: Sequence[TrainRun[Any]]) -> str:
    """A table with a line per run: speed, its range, loss, and AUC over the rows trained on.

    The speed is the median over the turns, and the range from the slowest to the fastest of them.
    """
    rows = [
        (
            run.name,
            len(run.losses),
            _speed(run.steps_per_s),
            "n/a" if run.range_per_s is None else " to ".join(map(_speed, run.range_per_s)),
            f"{run.rows_per_s:,.0f}",
            f"{run.recent_loss():.4f}",
            _number(run.auc(), 4),
        )
        for run in runs
    ]
    return table(("plan", "steps", "steps/s", "range", "rows/s", "loss", "AUC"), rows)


def format_comparison(a: TrainRun[Any], b: TrainRun[Any], result: Comparison) -> str:
    """Whether two runs are equal, bit for bit."""
    names = f"{a.name} and {b.name}"
    if result.equal:
        return (
            f"{names}: bit-equal: {len(a.losses)} losses and "
            f"{len(list(a.job.model.parameters()))} parameters"
        )
    losses = (
        f"all {len(a.losses)} losses are equal"
        if result.first_loss is None
        else f"losses differ from step {result.first_loss} on"
    )
    text = f"{names}: NOT EQUAL: {losses}; {len(result.parameters)} parameters differ"
    return text + "".join(
        f"; {run.name} may read {state} {count} iteration{'s' * (count > 1)} old"
        for run in (a, b)
        for state, count in run.plan.stale.items()
    )


def format_speed(a: TrainRun[Any], b: TrainRun[Any], result: Speed) -> str:
    """How the speed of ``b`` compares with that of ``a``, if the turns are able to tell."""
    names = f"{b.name} over {a.name}"
    if result.between is None:
        return f"{names}: no difference was measured: one turn has no range; train for more steps"
    between = f"{result.between.least:.2f} to {result.between.most:.2f}"
    if result.differs:
        return f"{names}: {result.ratio:.2f} ({between}) times as many steps per second"
    return f"{names}: no difference was measured: the ranges of steps per second overlap"


def format_rows(rows: RowCount) -> str:
    """How many rows were read, and what is wrong with the malformed ones."""
    if not rows.malformed:
        return f"{rows.lines:,} rows, none malformed"
    text = f"{rows.lines:,} rows, {rows.malformed:,} of them malformed and dropped:"
    shown = [f"  {row}" for row in rows.examples]
    if rows.malformed > len(shown):
        shown.append(f"  ... and {rows.malformed - len(shown):,} more")
    return "\n".join((text, *shown))


def format_evaluation(result: Evaluation) -> str:
    """Loss and AUC on held-out rows."""
    return (
        f"held-out rows: AUC {_number(result.auc, 4)}, loss {result.loss:.4f}, {result.rows:,} rows"
    )


def _number(value: float, digits: int) -> str:
    return "n/a" if math.isnan(value) else f"{value:.{digits}f}"


def _speed(per_s: float) -> str:
    """Four digits, so that the ratio of two of them can be checked."""
    return f"{per_s:.{max(0, 3 - math.floor(math.log10(per_s)))}f}"
