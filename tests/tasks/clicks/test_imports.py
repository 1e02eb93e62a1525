"""What importing the click job does to the process."""

from __future__ import annotations

import pytest

from tests.support.scripts import Script, Scripts

CODE = """
import torch
from swpipe.tasks.clicks import ClickJob, _torchrec
ClickJob
import polars
one = torch.tensor([1])
_torchrec.KeyedJaggedTensor(keys=["id"], values=one, lengths=one).to_dict()
print(polars.thread_pool_size())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "threads"), [({}, 1), ({"POLARS_MAX_THREADS": "2"}, 2)])
def test_polars_takes_one_thread_unless_told_otherwise(
    scripts: Scripts, environment: dict[str, str], threads: int
) -> None:
    """Two pools of as many threads as there are cores would fight; and nobody warns."""
    alone = "import os; os.environ.pop('POLARS_MAX_THREADS', None)\n"  # which tests here may set
    told = f"os.environ.update({environment})\n"
    done = scripts.run(Script(alone + told + CODE, errors=("Warning",)))
    assert done == (0, f"{threads}\n", "")
