"""Small click logs to test with; without the libraries of a job, its tests are skipped."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tasks.clicks.rows import write_log

if find_spec("torchrec") is None or find_spec("polars") is None:
    collect_ignore_glob = ["test_*.py"]
    collect_ignore = ["torchrec"]


@pytest.fixture
def small_log(tmp_path: Path) -> Path:
    """A log of 50 good rows."""
    return write_log(tmp_path / "small.tsv", 50)
