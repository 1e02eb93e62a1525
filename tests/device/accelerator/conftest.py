"""Fixtures of tests that need an accelerator: CUDA, or else the test backend."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from tests import backend

# cuBLAS reads it when it starts: with a workspace of its own per stream, results are the same bits.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    """Finish all work and free all memory after a test."""
    yield
    if not torch.cuda.is_available():
        backend.open_gates()
    torch.accelerator.synchronize()
    gc.collect()
    torch.accelerator.empty_cache()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms of torch only."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
