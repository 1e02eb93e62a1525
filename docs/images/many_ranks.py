"""Make the picture of steps by plan and number of ranks: python docs/images/many_ranks.py

All is simulated, so that other processes on the machine do not matter. It takes a minute, needs
matplotlib, and prints the steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib import pyplot as plt

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from bench import recsys14  # noqa: E402 - from the repository, wherever this is run
from swpipe.core.resolved import resolve_plan  # noqa: E402
from swpipe.planning import Ranks  # noqa: E402
from swpipe.planning.rank_simulation import step_us  # noqa: E402
from swpipe.program import compile_plan  # noqa: E402

NUMBERS = (1, 8, 64, 256, 1_024, 4_096)
PLANS = {
    "serial, run_ahead=0": recsys14.with_read(pipelined=False, run_ahead=0),
    "serial, launches ahead": recsys14.with_read(pipelined=False, run_ahead=1),
    "pipelined, 3 in flight": recsys14.with_read(),
    "input slack of 1 batch": recsys14.with_read(1),
    "input slack of 2 batches": recsys14.with_read(2),
    "pipelined, run_ahead=4": recsys14.with_read(run_ahead=4),
}


def main() -> None:
    """Draw the steps, and print them."""
    costs = recsys14.costs(read_us=60_000)
    figure, axes = plt.subplots(figsize=(8, 4.2))
    for name, plan in PLANS.items():
        program = compile_plan(resolve_plan(plan), streams=True)
        slow = {"read": (0.01, 5.0)}
        steps_ms = [step_us(program, costs, Ranks(n, 0.05, slow)) / 1e3 for n in NUMBERS]
        print(f"{name:26}", " ".join(f"{ms:6.1f}" for ms in steps_ms))
        axes.plot(NUMBERS, steps_ms, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(NUMBERS, [f"{n:,}" for n in NUMBERS])
    axes.set_xlabel("ranks; jitter of 5%, 1% of the reads five times as long")
    axes.set_ylabel("ms per step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "many_ranks.png", dpi=120)


if __name__ == "__main__":
    main()
