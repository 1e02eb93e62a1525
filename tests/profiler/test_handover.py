"""The time of a hand-over between two threads."""

from __future__ import annotations

import threading

import pytest

import swpipe.profiler.costing
import swpipe.profiler.thread_costs
from swpipe._engine.waiting import Host, ProgressCounter
from swpipe.profiler.thread_costs import measure_handover_s
from tests.support.exploring import _ExploredCounter
from tests.support.virtual_clock import TimedHost


class SlowHost(TimedHost):
    """A host whose threads take 15 us of virtual time to wake up."""

    def counter(self) -> ProgressCounter:
        self._counters += 1
        return SlowCounter(self, f"counter {self._counters}")


class SlowCounter(_ExploredCounter):
    """A counter of a ``SlowHost``."""

    def wait(self, count: int) -> None:
        waits = self.count < count
        super().wait(count)
        if waits:
            self._host.sleep(15e-6)


def test_a_handover_takes_half_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two threads wakes up once per round trip."""
    host = SlowHost()
    monkeypatch.setattr(swpipe.profiler.thread_costs, "time", host)
    assert measure_handover_s(host) == pytest.approx(15e-6)


def test_the_thread_ends_when_the_measurement_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C reaches the caller, and the other thread does not wait forever."""
    threads = threading.active_count()

    class Interrupted:
        def perf_counter(self) -> float:
            raise KeyboardInterrupt

    monkeypatch.setattr(swpipe.profiler.thread_costs, "time", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        measure_handover_s(Host())
    assert threading.active_count() == threads
