"""How good the planner's plans are, and how long it takes: random loops against their proofs.

Not part of ``python -m tests.bench``: proofs take minutes.
``python -m tests.bench.planning 200 50`` plans and proves 200 loops of 14 tasks, and plans 50 of
200; a third number is the seconds that a proof may take.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass

from swpipe.plans import auto_plan, prove
from tests.plans.instances import instance

RESOLUTION_US = 10.0


@dataclass(frozen=True)
class Planned:
    """One loop: the planner's interval over the best known and over the bound; seconds of CPU."""

    number: int
    over_best: float
    over_bound: float
    proved: bool
    seconds: float


def planned(number: int, size: int, proof_s: float) -> Planned:
    """Plan one loop; prove it where there is time for that."""
    given = instance(number, size)
    begin = time.process_time()
    choice = auto_plan(given.plan, given.costs, limits=given.limits, streams=given.streams)
    seconds = time.process_time() - begin
    if not proof_s:
        return Planned(number, 1.0, 1 + choice.gap, choice.gap < 1e-9, seconds)
    proof = prove(
        given.plan,
        given.costs,
        limits=given.limits,
        streams=given.streams,
        seconds=proof_s,
        resolution_us=RESOLUTION_US,
    )
    return Planned(
        number,
        choice.ii_us / proof.ii_us,
        choice.ii_us / (proof.bound_us + RESOLUTION_US * (proof.bound_us < proof.ii_us)),
        proof.optimal,
        seconds,
    )


def report(what: str, found: list[Planned]) -> None:
    """Print what share is optimal, how far the rest is, and how long it took."""
    best = [each for each in found if each.over_best <= 1 + 1e-9]
    seconds = [each.seconds for each in found]
    print(
        f"{what}: {len(found)} loops; {sum(p.proved for p in found)} settled; "
        f"{len(best) / len(found):.1%} are the best known; at most "
        f"{max(p.over_best for p in found) - 1:.2%} above it; "
        f"{sum(p.over_bound <= 1.02 for p in found)} within 2%, "
        f"{sum(p.over_bound <= 1.05 for p in found)} within 5% of the bound; "
        f"median {statistics.median(seconds) * 1e3:.0f} ms, at most {max(seconds) * 1e3:.0f} ms"
    )


def main(small: int, large: int, proof_s: float = 24.0) -> None:
    """Plan so many loops of 14 tasks and of 200; even numbers are for devices with streams."""
    for count, size, seconds in ((small, 14, proof_s), (large, 200, 0.0)):
        if count:
            found = [planned(number, size, seconds) for number in range(count)]
            report(f"{size} tasks", found)
            report("  on a device with streams", found[::2])
            report("  on a CPU", found[1::2] or found)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
