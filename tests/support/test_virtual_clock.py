"""The virtual clock that other tests stand on: known times, in no time."""

from __future__ import annotations

import pytest

from swpipe import StreamSpec
from tests.support.virtual_clock import TimedDevice, TimedHost


@pytest.mark.parametrize("seed", range(5))
def test_the_clock_jumps_to_the_earliest_sleeper(seed: int) -> None:
    """Threads sleep side by side; what they do in between takes no time."""
    host, log = TimedHost(seed), []
    done = [host.counter() for _ in range(2)]

    def sleeps(name: str, seconds: float, times: int, number: int) -> None:
        for _ in range(times):
            host.sleep(seconds)
            log.append((host.perf_counter(), name))
        done[number].advance(1)

    threads = [
        host.start("a", lambda: sleeps("a", 3600.0, 2, 0)),
        host.start("b", lambda: sleeps("b", 2400.0, 2, 1)),
    ]
    for counter in done:
        counter.wait(1)
    assert log == [(2400.0, "b"), (3600.0, "a"), (4800.0, "b"), (7200.0, "a")]
    for thread in threads:
        thread.join()


def test_a_stream_does_one_thing_after_the_other() -> None:
    """From when it was given it, and from when what it waits for is done."""
    host = TimedHost()
    device = TimedDevice(host)
    copy, done, begin = device.new_stream(StreamSpec()), device.new_event(), device.new_event()
    host.sleep(1.0)
    begin.record(copy)
    with device.on(copy):
        device.launch(2.0)
        device.launch(3.0)
    done.record(copy)
    assert begin.query()
    assert not done.query()
    assert begin.elapsed_time(done) == 5000.0
    done.wait(device.current_stream())
    device.launch(1.0)
    done.synchronize()
    assert host.perf_counter() == 6.0
    device.synchronize()
    assert host.perf_counter() == 7.0
