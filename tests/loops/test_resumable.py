"""A job over a plan of one's own that is killed, and resumed, has the numbers of one that was not.

Eight loops, three plans; each is resumed under another plan, too.
"""

from __future__ import annotations

import io
import random
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.loops.resumable_jobs import LOOPS, PLANS, Job

# torchdata, when a loader is made

KILLS = 9
"""In each of the loops and plans."""


class Whole(NamedTuple):
    """A run that was never stopped: its losses, a checkpoint after each, and what is left."""

    losses: list[float]
    checkpoints: list[bytes]
    final: dict[str, Any]


@cache
def whole(loop: str, plan: str) -> Whole:
    """The run, with a checkpoint after each iteration."""
    job, losses, checkpoints = Job(loop, plan), list[float](), list[bytes]()
    with job.pipe:
        for loss in job.losses():
            losses.append(loss)
            file = io.BytesIO()
            job.save(file)
            checkpoints.append(file.getvalue())
    return Whole(losses, checkpoints, job.parts.save())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loop", LOOPS)
def test_any_place_is_good_for_a_checkpoint(loop: str, plan: str) -> None:
    """Random places, and any plan to go on with: losses and all state are bit-equal."""
    run = whole(loop, plan)
    assert run.losses == whole(loop, "serial").losses
    draws = random.Random(f"{loop} {plan}")
    for place in draws.sample(range(len(run.losses)), KILLS):
        resumed = Job(loop, draws.choice([plan, *PLANS]), seed=draws.randrange(99))
        torch.rand(draws.randrange(5))  # what else a new process does
        resumed.load(io.BytesIO(run.checkpoints[place]))
        with resumed.pipe:
            assert list(resumed.losses()) == run.losses[place + 1 :]
        torch.testing.assert_close(resumed.parts.save(), run.final, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "plans"),
    [
        ("given", ["two workers"] * 2),
        ("torchdata", ["prefetched", "two workers", "serial"]),
        ("torchdata, batches", ["prefetched", "two workers"]),
    ],
)
def test_a_killed_process_is_gone_on_with_by_a_new_one(
    loop: str, plans: list[str], tmp_path: Path
) -> None:
    """By SIGKILL, between or within iterations; twice, and then to the end."""
    expected = whole(loop, "serial").losses
    draws, seen = random.Random(loop), {}
    for number, plan in enumerate(plans, start=1):
        command = [sys.executable, "-m", "tests.loops.resumable_jobs", loop, plan]
        process = subprocess.Popen(
            [*command, str(tmp_path / "checkpoint.pt")], stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            lines = iter(process.stdout)
            if number < len(plans):
                killed_after = draws.randrange(2, 7)
                for _, line in zip(range(killed_after), lines, strict=False):
                    seen.update([line.split()])
                process.kill()
            seen.update(line.split() for line in lines)
        assert process.returncode == (0 if number == len(plans) else -signal.SIGKILL)
    assert {int(key): float.fromhex(loss) for key, loss in seen.items()} == dict(
        enumerate(expected)
    )
