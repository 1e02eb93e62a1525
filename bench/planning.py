"""The quality of the planner's plans and its run time, on random loops whose best plans are known.

Not part of ``python -m bench``: it takes minutes. ``python -m bench.planning`` plans 200 loops of
14 tasks, 20 of 60 and 10 of 200; ``python -m bench.planning 14`` those of 14. Loops with even
numbers are for devices with streams. Times are CPU time.

``best_known.json`` has the least interval known of each loop, in microseconds. If you find a better
plan, write its interval there.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from swpipe.planning import auto_plan
from tests.planning.instances import instance

BEST_KNOWN = Path(__file__).with_name("best_known.json")
SAME = 1 + 1e-6


class Row(NamedTuple):
    """A number of loops of one size, and the bars of their plans."""

    tasks: int
    loops: int
    bars: str


ROWS = (
    Row(14, 200, "95% equal, at most 3% above, median 150 ms, at most 1.5 s"),
    Row(60, 20, "3% above on average, at most 5 s"),
    Row(200, 10, "8% above on average, at most 15 s"),
)


class Planned(NamedTuple):
    """The plan of one loop: its interval over the best known, and the seconds of planning."""

    over_best: float
    seconds: float


def planned(number: int, tasks: int, best_us: float) -> Planned:
    """Plan one loop."""
    given = instance(number, tasks)
    begin = time.process_time()
    choice = auto_plan(given.plan, given.costs, limits=given.limits, streams=given.streams)
    seconds = time.process_time() - begin
    if choice.ii_us * SAME < best_us:
        print(f"    loop {number} of {tasks} tasks: {choice.ii_us} us beats the best known")
    return Planned(max(1.0, choice.ii_us / best_us), seconds)


def main(*sizes: int) -> None:
    """Print a row for each of the given sizes, or for all if none is given."""
    best_us = json.loads(BEST_KNOWN.read_text())
    planned(0, 14, 1.0)  # what is loaded once is not counted
    for tasks, loops, bars in ROWS:
        if sizes and tasks not in sizes:
            continue
        found = [planned(number, tasks, best_us[str(tasks)][number]) for number in range(loops)]
        over, seconds = zip(*found, strict=True)
        print(
            f"{loops} loops of {tasks} tasks: {sum(x <= SAME for x in over) / loops:.1%} equal the "
            f"best known, {statistics.mean(over) - 1:.2%} above it on average, "
            f"{max(over) - 1:.2%} at most; {statistics.median(seconds) * 1e3:.0f} ms in the "
            f"median, {max(seconds):.2f} s at most (bars: {bars})"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
