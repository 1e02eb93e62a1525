"""The time of ``import swpipe`` and of the first batch, after ``import torch``, from bytecode."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from bench.measure import Row, Spread, tolerated

MOST_MS = 40.0

FIRST_MOST_MS = 50
"""The limit for a first batch. The plain loop has it in less than 1 ms, which counts as 0."""

_TIMED = """
import time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
import swpipe
end = time.perf_counter()
batches = [torch.ones(4) for _ in range(8)]
ahead = iter(swpipe.ahead(batches))
next(ahead)
first = time.perf_counter()
ahead.close()
print(*(1e3 * seconds for seconds in (end - middle, middle - begin, first - middle)))
"""


def rows(rounds: int = 20) -> list[Row]:
    """Return the import time over its limit, that of ``import torch``, and the first batch's time.

    The first batch's time is the minimum of all rounds, since other processes delay single ones.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each import compiles the sources

        def measured() -> list[float]:
            done = subprocess.run(
                [sys.executable, "-c", _TIMED],
                check=True,
                capture_output=True,
                text=True,
                env=environment,
            )
            return [float(ms) for ms in done.stdout.split()]

        measured()  # writes the bytecode
        ours, theirs, first = zip(*(measured() for _ in range(rounds)), strict=True)
    return [
        Row(
            what=f"import swpipe, over {MOST_MS:.0f} ms",
            ours=f"{Spread.of(ours).text(1)} ms",
            beside=f"import torch {Spread.of(theirs).text(0)} ms",
            ratio=Spread.of(ms / MOST_MS for ms in ours),
            bar=1.0,
        ),
        tolerated(
            "import swpipe and the first batch ahead, the least", min(first), FIRST_MOST_MS, "ms"
        ),
    ]
