"""An idle machine and an empty environment, whatever this one is; and a clock."""

from __future__ import annotations

import os

import pytest

import swpipe.doctor.examination
from tests.profiler.conftest import host  # noqa: F401 - a fixture

NAMES = ("CUDA", "HIP", "AMD", "OMP", "KMP", "PYTORCH", "NCCL", "TORCH_NCCL", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own is found."""
    monkeypatch.setattr(swpipe.doctor.examination, "load_so_far", lambda **given: None)
    for name in [name for name in os.environ if name.startswith(NAMES)]:
        monkeypatch.delenv(name)
