"""How long ``import swpipe`` takes after ``import torch``, from cached bytecode."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from tests.bench.measure import Row, Spread

MOST_MS = 40.0

_TIMED = """
import time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
import swpipe
print(1e3 * (time.perf_counter() - middle), 1e3 * (middle - begin))
"""


def rows(rounds: int = 20) -> list[Row]:
    """The row's ratio is over the limit; ``import torch`` stands beside it."""
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
        ours, theirs = zip(*(measured() for _ in range(rounds)), strict=True)
    return [
        Row(
            what=f"import swpipe, over {MOST_MS:.0f} ms",
            ours=f"{Spread.of(ours).text(1)} ms",
            beside=f"import torch {Spread.of(theirs).text(0)} ms",
            ratio=Spread.of(ms / MOST_MS for ms in ours),
            bar=1.0,
        )
    ]
