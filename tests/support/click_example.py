"""The click model of the examples, for tests and benchmarks: docs/examples/clicks."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "clicks"

HAS_POLARS = find_spec("polars") is not None
"""Whether the modules can be imported."""


def example(name: str) -> Any:
    """Return a module of the example, which its neighbours import by their names alone."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return import_module(name)
