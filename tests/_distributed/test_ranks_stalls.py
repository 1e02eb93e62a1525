"""A collective that never completes: every other rank ends in time, and says where it was.

The ranks are scripts of their own (``stall_job``), since what counts is how their processes end.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from swpipe._engine.watchdog import STALL_EXIT_CODE
from tests._distributed.stall_job import AT, CATCHES

ROOT = Path(__file__).parents[2]

WITHIN_S = 60.0
"""The promise is ``STALL_S`` + 10 s, which ``stall_job`` prints; a busy machine takes longer."""


def run_job(folder: Path, size: int, how: str, group: str) -> list[tuple[int, str]]:
    """The exit code and standard error of each rank that has to end because of the stall."""
    done = subprocess.run(
        [sys.executable, "-m", "tests._distributed.stall_job", str(size), how, group, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    said = json.loads(done.stdout)
    victim = 0 if "-first" in how else size - 1
    ended = []
    for rank in set(range(size)) - {victim}:
        assert said["took_s"][rank] < WITHIN_S
        ended.append((said["codes"][rank], (folder / f"stderr{rank}").read_text()))
        assert f"rank {rank}: " in ended[-1][1] or f"[rank{rank}]: " in ended[-1][1]
    return ended


def check_others_end(folder: Path, size: int, how: str, group: str) -> None:
    """Each ends in time, with an exit code that is not 0, and rank, task and iteration."""
    for code, error in run_job(folder, size, how, group):
        assert code in (1, STALL_EXIT_CODE), error  # not a signal: no abort, no crash
        stalled = f"inside task 'reduce' of iteration {AT}"
        failed = f"at task 'reduce', iteration {AT}, thread group '{group}'"
        assert stalled in error or failed in error, error
        if how == "left":
            # On the last rank to fail only this one is without a word; others still waited before.
            assert re.search(rf"swpipe: ranks? ([0-9, ]* )?{size - 1} left no word", error), error


def test_ranks_end_when_one_is_stopped_that_holds_the_store(tmp_path: Path) -> None:
    """The collective is on the caller's thread, which nothing interrupts."""
    check_others_end(tmp_path, 2, "stopped-first", "default")


def test_ranks_end_when_one_has_less_data(tmp_path: Path) -> None:
    """The collective is on a worker's thread, inside which the interpreter exits."""
    check_others_end(tmp_path, 2, "uneven", "io")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "group", "how", "who"),
    [
        *product((2,), ("default", "io"), ("stopped", "left", "uneven"), ("",)),
        *product((2,), ("default", "io"), ("stopped",), ("-first",)),
        (4, "default", "left", ""),
        (4, "io", "uneven", "-first"),
    ],
)
def test_every_other_rank_ends(tmp_path: Path, size: int, group: str, how: str, who: str) -> None:
    """All ways to stop communicating, of the last rank and of the one that holds the store."""
    check_others_end(tmp_path, size, how + who, group)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["", "-first"])
def test_a_script_that_catches_the_stall_exits_with_its_own_code(tmp_path: Path, who: str) -> None:
    """A worker is still inside the collective then."""
    for code, error in run_job(tmp_path, 2, f"stopped{who}+catch", "io"):
        assert code == CATCHES, error
