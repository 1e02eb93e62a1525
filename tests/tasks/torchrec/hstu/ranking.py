"""The HSTU model of the documentation."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_PATH = Path(__file__).parents[4] / "docs" / "examples" / "hstu_model.py"


def _loaded() -> Any:
    spec = spec_from_file_location(_PATH.stem, _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[_PATH.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hstu_model: Any = sys.modules.get(_PATH.stem) or _loaded()
SMALL = hstu_model.RankingConfig(items=40, width=8, heads=2, layers=1, longest=6)
