"""Run the tests that draw random examples on new ones, round after round, for about MINUTES.

Usage: python .ci/test_long.py MINUTES [ARGUMENTS OF PYTEST]

Each round multiplies the examples of the quick suite by FACTOR and begins at a new seed, which is
printed. Ends with the numbers of examples of each kind, and with 1 if a test has failed or a number
is below LEAST; in less than half an hour these numbers are not asked for.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FACTOR = 8
LEAST = {"plans": 20_000, "loops": 3_000, "endings": 2_000}
FULL_MINUTES = 30.0
PYTEST = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4"]
OPTIONS = ["--dist", "worksteal", "-m", "examples", "--timeout", "3600"]
OPTIONS += ["-o", "faulthandler_timeout=3500"]


def one_round(log: Path, arguments: list[str]) -> int:
    """Run all of them once, those of an accelerator in a process of their own; 0 if none fails."""
    seed = random.SystemRandom().randrange(2**31)
    names = {"SWPIPE_EXAMPLES_FACTOR": f"{FACTOR}", "SWPIPE_EXAMPLES_SEED": f"{seed}"}
    print(*(f"{name}={value}" for name, value in names.items()), flush=True)
    environment = {**os.environ, **names, "SWPIPE_EXAMPLES_LOG": str(log)}
    runs = [arguments] if arguments else [[], ["tests/device", "--accelerator"]]
    commands = [[*PYTEST, *OPTIONS, *run] for run in runs]
    codes = [subprocess.run(c, cwd=ROOT, env=environment, check=False).returncode for c in commands]
    return max(map(abs, codes))  # below 0: a signal


def main(minutes: float, arguments: list[str]) -> int:
    """Run rounds until another one would end too late; return 1 if anything is wrong."""
    begin_s = time.monotonic()
    rounds = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        log.touch()
        took_s = 0.0
        while not failed and took_s * (rounds + 1) <= 60 * minutes * rounds:
            failed = one_round(log, arguments)
            rounds += 1
            took_s = time.monotonic() - begin_s
        run = sum(map(Counter, map(json.loads, log.read_text().splitlines())), Counter[str]())
    print(f"{rounds} rounds, {took_s / 60:.0f} minutes:")
    print(", ".join(f"{number:,} {kind}" for kind, number in sorted(run.items())))
    asked = LEAST if minutes >= FULL_MINUTES and not arguments else {}
    few = [f"fewer than {least:,} {kind}" for kind, least in asked.items() if run[kind] < least]
    print(*few, sep="\n", end="\n" if few else "")
    return int(bool(failed or few))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
