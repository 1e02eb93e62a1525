"""These tests need an accelerator: CUDA, or else the test backend; or they are skipped.

The process then sees an accelerator for ever, so they do not share one with the other tests:
``python -m pytest tests/accelerator``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import backend

# cuBLAS reads it when it starts: with a workspace of its own per stream, results are the same bits.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

HERE = Path(__file__).parent


def why_not() -> str | None:
    """Why the tests cannot run on this machine; None where they can."""
    return None if torch.cuda.is_available() else backend.why_not()


def pytest_report_header() -> list[str]:
    """How long the test backend took to build, where that is known."""
    seconds = None if why_not() or torch.cuda.is_available() else backend.build_seconds()
    return [] if seconds is None else [f"test backend: built in {seconds:.0f} s"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where there is no device."""
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    reason = why_not()
    if reason is not None:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    """No test finds the work or the memory of another."""
    yield
    if not torch.cuda.is_available():
        backend.open_gates()
    torch.accelerator.synchronize()
    gc.collect()
    torch.accelerator.empty_cache()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Within the test torch uses deterministic algorithms only."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
