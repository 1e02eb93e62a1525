"""The virtual device finds the violations that it is meant to find, and no others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from swpipe.core.plan import StreamSpec
from tests.device.virtual import (
    Buffer,
    EventReused,
    Race,
    RanAhead,
    VirtualDevice,
    VirtualStream,
    WaitBeforeRecord,
    Work,
)

SEEDS = range(10)


def kinds(device: VirtualDevice) -> set[type]:
    """Return the kinds of violation that a device has found."""
    return {type(violation) for violation in device.violations}


def constant(device: VirtualDevice, value: Any) -> Buffer:
    """Return a new buffer with a value, made on the current stream."""
    return device.launch(lambda: value)


def two_streams(device: VirtualDevice) -> tuple[VirtualStream, VirtualStream]:
    """Return two streams other than the default one."""
    return device.new_stream(StreamSpec()), device.new_stream(StreamSpec())


def on_thread(device: VirtualDevice, fn: Callable[[], None]) -> None:
    """Run ``fn`` on a thread that the device does not know."""
    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()


def test_some_streams_run_nothing_unless_forced() -> None:
    """A scheduler that never delays work would find nothing."""
    late = 0
    for seed in SEEDS:
        device, ran = VirtualDevice(seed), []
        device.launch(lambda ran=ran: ran.append(0))
        late += not ran
        device.synchronize()
        assert ran == [0]
    assert 0 < late < len(SEEDS)


def test_an_event_orders_nothing_that_came_after_its_record() -> None:
    """An event marks a point, not a stream."""
    device = VirtualDevice()
    copy, side = two_streams(device)
    event = device.new_event()
    event.record(copy)
    with device.on(copy):
        made = constant(device, 1)
    event.wait(side)
    with device.on(side):
        device.launch(lambda x: x, made)
    assert kinds(device) == {Race}


def test_a_write_must_come_after_the_reads_before_it() -> None:
    """Readers do not race with each other, but with the next writer."""
    device = VirtualDevice()
    copy, _ = two_streams(device)
    made, event = constant(device, 1), device.new_event()
    event.record(device.current_stream())
    event.wait(copy)
    with device.on(copy):
        device.launch(lambda x: x, made)
    device.launch(lambda x: x, made)
    device.check()
    device.launch(lambda: 2, into=made)
    assert kinds(device) == {Race}


def test_the_order_of_two_threads_on_one_stream_is_luck_until_they_tell() -> None:
    """Stream order counts only if the submitting thread knows of the other's submission."""
    device = VirtualDevice()
    counter, box = device.host.counter(), []
    on_thread(device, lambda: box.append(constant(device, 1)))
    device.launch(lambda x: x, box[0])
    assert kinds(device) == {Race}

    device = VirtualDevice()
    counter, box = device.host.counter(), []

    def work() -> None:
        box.append(constant(device, 1))
        counter.advance(1)

    on_thread(device, work)
    counter.wait(1)
    device.launch(lambda x: x, box[0])
    device.check()


def test_a_signal_tells_no_more_than_the_count_that_was_waited_for() -> None:
    """The writer's further progress this time says nothing about the next time."""
    device = VirtualDevice()
    counter, box = device.host.counter(), []

    def work() -> None:
        counter.advance(1)
        box.append(constant(device, 1))
        counter.advance(2)

    on_thread(device, work)
    counter.wait(1)
    device.launch(lambda x: x, box[0])
    assert kinds(device) == {Race}


def test_waiting_for_an_event_that_was_never_recorded_is_a_violation() -> None:
    """CUDA allows it, and orders nothing."""
    device = VirtualDevice()
    copy, _ = two_streams(device)
    device.new_event().wait(copy)
    assert kinds(device) == {WaitBeforeRecord}


def test_waiting_must_be_known_to_come_after_the_record() -> None:
    """The earlier record this time is luck."""
    device = VirtualDevice()
    copy, _ = two_streams(device)
    event = device.new_event()
    on_thread(device, lambda: event.record(copy))
    event.wait(device.current_stream())
    assert kinds(device) == {WaitBeforeRecord}


def test_all_waits_must_happen_before_the_next_record() -> None:
    """Otherwise some consumer may get the new record in place of the old one."""
    device = VirtualDevice()
    copy, _ = two_streams(device)
    event, recorded = device.new_event(), device.host.counter()
    event.record(copy)
    recorded.advance(1)

    def consume() -> None:
        recorded.wait(1)
        event.wait(device.current_stream())

    on_thread(device, consume)
    device.check()
    event.record(copy)
    assert kinds(device) == {EventReused}


def test_a_recorded_block_is_free_once_the_other_stream_is_done() -> None:
    """Held blocks must not leak."""
    device = VirtualDevice()
    copy, side = two_streams(device)
    with device.on(copy):
        made = constant(device, 1)
    device.synchronize()
    device.hold([made], [side])
    del made
    device.synchronize()
    with device.on(copy):
        constant(device, 2)
    assert device.reused == 1
    device.check()


def test_the_host_must_know_that_old_work_is_done() -> None:
    """Work that happens to be done does not count; a query of an event does."""
    device = VirtualDevice()
    device.launch(lambda: 1, work=Work("t", 0))
    event = device.new_event()
    event.record(device.current_stream())
    device.launch(lambda: 2, work=Work("t", 1))
    while not event.query():
        pass
    device.expect_done(0)
    device.check()
    device.expect_done(1)
    assert kinds(device) == {RanAhead}
