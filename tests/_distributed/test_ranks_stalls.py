"""A collective that never completes: every other rank ends in time, and says where it was.

The ranks are scripts of their own (``stall_job``), since what counts is how their processes end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from swpipe._engine.interruption import STALL_EXIT_CODE
from tests._distributed.stall_job import AT, CATCHES
from tests.support.scripts import Script, Scripts

WITHIN_S = 60.0
"""The promise is ``STALL_S`` + 10 s, which ``stall_job`` prints; a busy machine takes longer."""

JOBS = (
    *("2:stopped-first:default", "2:stopped+catch:io", "3:left:default"),
    *("2:uneven:default", "2:uneven-first:io"),
)


def ended(scripts: Scripts, folder: Path, jobs: Collection[str]) -> Iterator[tuple[str, int, str]]:
    """Yield job, exit code and standard error of each rank that the stall has to end."""
    script = Script(module="tests._distributed.stall_job", args=(str(folder), *jobs))
    done = scripts.run(script, deadline_s=180)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for job in jobs:
        size = int(job.partition(":")[0])
        victim = 0 if "-first" in job else size - 1
        for rank in set(range(size)) - {victim}:
            error = (folder / job / f"stderr{rank}").read_text()
            took_s = said[job]["took_s"][rank]
            assert took_s is not None, f"{job}: it ended before iteration {AT}\n{error}"
            assert took_s < WITHIN_S, (job, error)
            assert f"rank {rank}: " in error or f"[rank{rank}]: " in error, (job, error)
            yield job, said[job]["codes"][rank], error


def test_every_other_rank_ends(scripts: Scripts, tmp_path: Path) -> None:
    """Each ends in time, with an exit code that is not 0, and names rank, task and iteration.

    The ranks stop communicating in all ways; the one that stops is the last rank, or the rank with
    the store. Inside a collective, nothing interrupts the caller's thread; a worker's thread
    outlives its script, also if the script catches the stall and exits with its own code. If the
    stopped rank has the store, the others learn nothing about it.
    """
    for job, code, error in ended(scripts, tmp_path, JOBS):
        size, how, group = job.split(":")
        if how.endswith("+catch"):
            assert code == CATCHES, (job, error)
            continue
        assert code in (1, STALL_EXIT_CODE), (job, error)  # no signal: no abort, no crash
        stalled = f"inside task 'reduce' of iteration {AT}"
        failed = f"at task 'reduce', iteration {AT}, thread group '{group}'"
        assert stalled in error or failed in error, (job, error)
        if how == "left":
            # On the last rank to fail only this one is without a word; others still waited
            # before.
            without = rf"swpipe: ranks? ([0-9, ]* )?{int(size) - 1} reported no failure"
            assert re.search(without, error), (job, error)
