"""What importing the click job does to the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import torch
from swpipe.tasks.clicks import _torchrec
import polars
one = torch.tensor([1])
_torchrec.KeyedJaggedTensor(keys=["id"], values=one, lengths=one).to_dict()
print(polars.thread_pool_size())
"""


def polars_threads(**environment: str) -> int:
    """Threads of polars in a process that uses the click job; warnings are errors there."""
    kept = {key: value for key, value in os.environ.items() if key != "POLARS_MAX_THREADS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "threads"), [({}, 1), ({"POLARS_MAX_THREADS": "2"}, 2)])
def test_polars_takes_one_thread_unless_told_otherwise(
    environment: dict[str, str], threads: int
) -> None:
    """Two pools of as many threads as there are cores would fight; and nobody warns."""
    assert polars_threads(**environment) == threads
