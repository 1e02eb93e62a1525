"""python -m tests.loops.through_signals SEED COUNT: SIGINTs at random moments of ``through``.

Prints a line for each trial that went wrong, and "COUNT trials" at the end.
"""

from __future__ import annotations

import random
import signal
import sys
import time

import swpipe
from tests._engine.signal_trials import deadline
from tests.support.sequencer import swpipe_threads

BATCHES = 60


class Trial:
    """An iterator through three functions, and a signal that arrives meanwhile."""

    def __init__(self, draws: random.Random) -> None:
        self.after_s = draws.uniform(1e-3, 25e-3)
        self.calls: list[int] = []
        self.written: list[int] = []
        self.results: list[int] = []

    def step(self, batch: int) -> int:
        time.sleep(3e-4)
        self.calls.append(batch)
        return batch

    def label(self, batch: int) -> int:
        time.sleep(2e-4)
        return batch

    def write(self, batch: int) -> int:
        self.written.append(batch)
        return batch

    def run(self) -> str:
        """Run the trial; return a description of what went wrong, or ""."""
        loop = swpipe.through(
            iter(range(BATCHES)),
            abs,
            swpipe.on_caller(self.step),
            self.label,
            self.write,
            draws=False,
            device="cpu",
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        raised = False
        try:
            signal.setitimer(signal.ITIMER_REAL, self.after_s)
            self.results.extend(loop)
        except KeyboardInterrupt:
            raised = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        # The step may have returned, and its value not been handed over when the signal came.
        if len({*self.calls} - {*self.written}) > int(raised):
            return f"raised {raised}: calls {self.calls}, written {self.written}"
        loop.close()
        if self.written != [*range(len(self.written))]:
            return f"raised {raised}: written {self.written} in the end"
        if left := swpipe_threads():
            return f"left {left}"
        return ""


def main() -> None:
    """Run all trials."""
    seed, count = map(int, sys.argv[1:3])
    draws = random.Random(seed)
    for number in range(count):
        with deadline(60):
            if wrong := Trial(draws).run():
                print(f"trial {number}: {wrong}")
    print(f"{count} trials")


if __name__ == "__main__":
    main()
