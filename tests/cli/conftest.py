"""What is spent on a plan, a profile or the click job says nothing about a command."""

from __future__ import annotations

from functools import partialmethod
from importlib.util import find_spec

import pytest

from swpipe.tuning import autotuning
from tests.tasks.clicks.rows import SMALL


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are searched, measured and tried with little effort."""
    for name, value in {"EFFORT": 0.1, "_ROUNDS": 2, "_WINDOWS": 1}.items():
        monkeypatch.setattr(autotuning, name, value)


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The click job has few parameters: what is recorded or profiled is copied again and again."""
    if find_spec("polars") and find_spec("torchrec"):
        from swpipe.tasks.clicks import ClickConfig

        monkeypatch.setattr(
            ClickConfig, "__init__", partialmethod(ClickConfig.__init__, model=SMALL)
        )
