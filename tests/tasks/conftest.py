"""Skip the tests of a system whose libraries are not installed."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torchrec") is None:
    collect_ignore_glob = ["test_*.py"]
    collect_ignore = ["torchrec"]
