"""How long it takes to make a pipeline, of 100 tasks and of 1,000."""

from __future__ import annotations

from bench.dispatch import THREE, plan
from bench.measure import Row, Spread, timed_ms
from swpipe import SWPipeline

BARS_MS = {100: None, 1000: 50.0}


def row(tasks: int, bar_ms: float | None, rounds: int) -> Row:
    """Time to make and close it, for a chain of tasks in three thread groups."""
    chain = plan(THREE, depth=5, tasks=tasks)

    took = timed_ms(rounds, lambda: SWPipeline(chain, device="cpu").close())
    return Row(
        what=f"making a pipeline of {tasks:,} tasks",
        ours=f"{Spread.of(took).text()} ms",
        beside="" if bar_ms is None else f"bar {bar_ms:g} ms",
        ratio=None if bar_ms is None else Spread.of(ms / bar_ms for ms in took),
        bar=None if bar_ms is None else 1.0,
    )


def rows(rounds: int = 7) -> list[Row]:
    """The larger one has a bar; both together show whether the time is linear in the tasks."""
    return [row(tasks, bar_ms, rounds) for tasks, bar_ms in BARS_MS.items()]
