"""The clock of these tests, and the report on a loop that is bound by its input."""

from __future__ import annotations

import pytest

from swpipe import report
from swpipe.reporting import StepReport
from tests.profiler.conftest import host  # noqa: F401 - a fixture
from tests.reporting.loops import image_loop
from tests.support.virtual_clock import TimedHost, tell_time


@pytest.fixture(scope="session")
def waiting() -> StepReport:
    """The report on a loop of 12 ms to decode, 7 ms to train, and a log that waits for 1 ms."""
    with pytest.MonkeyPatch.context() as patch:
        host = TimedHost()
        tell_time(patch, host)
        return report(image_loop(host, decode=12, train=7), range(8), name="images", rounds=2)
