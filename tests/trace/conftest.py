"""The clock of pipelines and their traces."""

from __future__ import annotations

from tests.profiler.conftest import host  # noqa: F401 - a fixture
