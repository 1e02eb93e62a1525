"""The clock of these tests, and the report on a loop that waits for its input."""

from __future__ import annotations

import pytest

from swpipe import report
from swpipe.reporting import StepReport
from tests.profiler.conftest import host  # noqa: F401 - a fixture
from tests.reporting.loops import image_loop
from tests.support.virtual_clock import TimedHost, tell_time


@pytest.fixture(scope="session")
def waiting() -> StepReport:
    """Decoding takes 12 ms, training 7, and a log waits for 1."""
    with pytest.MonkeyPatch.context() as patch:
        host = TimedHost()
        tell_time(patch, host)
        return report(image_loop(host, decode=12, train=7), range(8), name="images", rounds=2)
