"""What earlier modules imported is not searched by the collector again and again."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Each iteration that is recorded collects."""
    gc.collect()
    gc.freeze()
