"""The clock of the pipelines and of their traces."""

from __future__ import annotations

from tests.profiler.conftest import host  # noqa: F401 - a fixture
