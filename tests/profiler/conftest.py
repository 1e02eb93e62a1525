"""The clock of the profiler's tests."""

from __future__ import annotations

import pytest

from tests.support.virtual_clock import TimedHost, tell_time


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> TimedHost:
    """A host for the test's pipelines, whose clock the profiler uses."""
    host = TimedHost()
    tell_time(monkeypatch, host)
    return host
