"""The effort for a plan or a profile does not matter for a command."""

from __future__ import annotations

import pytest

from swpipe.tuning import autotuning


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search, measure and try plans with little effort."""
    for name, value in {"EFFORT": 0.1, "_ROUNDS": 2, "_WINDOWS": 1}.items():
        monkeypatch.setattr(autotuning, name, value)
