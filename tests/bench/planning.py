"""How good the planner's plans are, and how long it takes: random loops against their proofs.

Not part of ``python -m tests.bench``: proofs take minutes.
``python -m tests.bench.planning 200 50`` plans and proves 200 loops of 14 tasks, and plans 50 of
200; a third number is the seconds that a proof may take.

Loops of 200 tasks can not be proved. They are measured by the best plans ever found for them,
``best_known.json``: by this planner, with up to twenty times the effort, other numbers from chance
and many variants of it. Who finds better ones, writes them down there.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from swpipe.planning import auto_plan, prove
from tests.planning.instances import instance

RESOLUTION_US = 10.0


EFFORTS = (1.0, 5.0)

BEST_KNOWN = Path(__file__).with_name("best_known.json")
"""The number of tasks, to the least interval known of each loop, in microseconds."""


@dataclass(frozen=True)
class Planned:
    """One loop at one effort: the interval over the best known, over the bound; seconds it took."""

    number: int
    over_best: float
    over_bound: float
    proved: bool
    seconds: float


def planned(number: int, size: int, proof_s: float) -> list[Planned]:
    """Plan one loop, at each effort; prove it where there is time for that."""
    given = instance(number, size)
    found = []
    for effort in EFFORTS:
        begin = time.perf_counter()
        choice = auto_plan(
            given.plan, given.costs, limits=given.limits, streams=given.streams, effort=effort
        )
        found.append((choice, time.perf_counter() - begin))
    known_us = json.loads(BEST_KNOWN.read_text()).get(str(size), [])[number : number + 1]
    best_us = min([*known_us, *(choice.ii_us for choice, _ in found)])
    bound_us, proved = found[0][0].bounds.ii_us, False
    if proof_s:
        proof = prove(
            given.plan,
            given.costs,
            limits=given.limits,
            streams=given.streams,
            seconds=proof_s,
            resolution_us=RESOLUTION_US,
        )
        best_us, bound_us, proved = min(best_us, proof.ii_us), proof.bound_us, proof.optimal
    # What a proof rounds away is not ours to lose.
    same_us = RESOLUTION_US if proof_s else 0.0
    return [
        Planned(
            number,
            max(1.0, (choice.ii_us - same_us) / best_us),
            max(1.0, (choice.ii_us - same_us) / bound_us),
            proved or choice.gap < 1e-9,
            seconds,
        )
        for choice, seconds in found
    ]


def report(what: str, found: list[Planned]) -> None:
    """Print what share is optimal, how far the rest is, and how long it took."""
    best = [each for each in found if each.over_best <= 1 + 1e-9]
    settled = [each for each in found if each.proved]
    seconds = [each.seconds for each in found]
    print(
        f"{what}: {len(found)} loops; {len(best) / len(found):.1%} are the best known, "
        f"{sum(each in best for each in settled)} of the {len(settled)} settled ones; "
        f"{sum(p.over_best <= 1.02 for p in found)} within 2%, "
        f"{sum(p.over_best <= 1.05 for p in found)} within 5% of it, at most "
        f"{max(p.over_best for p in found) - 1:.2%} above; "
        f"{sum(p.over_bound <= 1.05 for p in found)} within 5% of the bound, which they are above "
        f"by {statistics.mean(p.over_bound for p in found) - 1:.2%} on average; "
        f"median {statistics.median(seconds) * 1e3:.0f} ms, at most {max(seconds) * 1e3:.0f} ms"
    )
    for each in found:
        if each.over_best > 1.02:
            print(f"    loop {each.number}: {each.over_best - 1:.2%} above the best known")


def main(small: int, large: int, proof_s: float = 24.0) -> None:
    """Plan so many loops of 14 tasks and of 200; even numbers are for devices with streams."""
    for number in range(3):  # what is compiled or loaded once is not counted
        planned(number, 14, 0.0)
    gc.freeze()  # nor are looks at the million objects of the libraries that happen to be loaded
    for count, size, seconds in ((small, 14, proof_s), (large, 200, 0.0)):
        if not count:
            continue
        found = [planned(number, size, seconds) for number in range(count)]
        for effort, of_effort in zip(EFFORTS, zip(*found, strict=True), strict=True):
            report(f"{size} tasks, effort {effort:g}", list(of_effort))
            report("  on a device with streams", list(of_effort[::2]))
            report("  on a CPU", list(of_effort[1::2] or of_effort))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
