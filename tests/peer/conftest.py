"""Skip TorchRec's tests if TorchRec is not installed."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torchrec") is None:
    collect_ignore_glob = ["test_*.py"]
