"""The clock of these tests."""

from __future__ import annotations

import pytest

from tests.support.virtual_clock import TimedHost, tell_time


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> TimedHost:
    """Pipelines of the test run on it, and the profiler takes the time from it."""
    host = TimedHost()
    tell_time(monkeypatch, host)
    return host
