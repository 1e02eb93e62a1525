"""An environment without the variables that a report examines."""

from __future__ import annotations

import os

import pytest

NAMES = ("CUDA", "HIP", "AMD", "OMP", "KMP", "PYTORCH", "NCCL", "TORCH_NCCL", "LOCAL_WORLD_SIZE")


def bare_environment(patch: pytest.MonkeyPatch) -> None:
    """Remove these variables from the environment for one test."""
    for name in [name for name in os.environ if name.startswith(NAMES)]:
        patch.delenv(name)
