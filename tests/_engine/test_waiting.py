"""A signal wakes whoever it serves, at once, and nobody else."""

from __future__ import annotations

import threading

import pytest

from swpipe._engine.waiting import Cancelled, Signal
from tests.support.sequencer import await_event


def waiter(signal: Signal, count: int) -> tuple[threading.Thread, list[str]]:
    """A thread that waits for ``count`` and notes how that ended."""
    ended: list[str] = []

    def wait() -> None:
        try:
            signal.wait(count)
        except Cancelled:
            ended.append("cancelled")
        else:
            ended.append("served")

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, ended


def test_waiting_for_what_has_been_reached_returns_at_once() -> None:
    """No other thread is needed."""
    signal = Signal()
    signal.advance(3)
    signal.wait(3)
    signal.wait(-2)


def test_advancing_wakes_those_served_and_leaves_the_others_asleep() -> None:
    """Each waiter sleeps until its own count."""
    signal = Signal()
    first, first_ended = waiter(signal, 1)
    second, second_ended = waiter(signal, 2)
    signal.advance(1)
    first.join(20)
    assert first_ended == ["served"]
    assert second_ended == []
    signal.advance(2)
    second.join(20)
    assert second_ended == ["served"]


def test_cancelling_wakes_everyone_and_refuses_later_waits() -> None:
    """What has been reached is still served; what has not raises."""
    signal = Signal()
    thread, ended = waiter(signal, 5)
    signal.advance(2)
    signal.cancel()
    thread.join(20)
    assert ended == ["cancelled"]
    signal.wait(2)
    with pytest.raises(Cancelled):
        signal.wait(3)


def test_no_wake_up_is_lost_under_contention() -> None:
    """A reader and a writer that race over every count both reach the end."""
    there, back = Signal(), Signal()
    rounds = 3000

    def echo() -> None:
        for count in range(1, rounds + 1):
            there.wait(count)
            back.advance(count)

    thread = threading.Thread(target=echo)
    thread.start()
    done = threading.Event()

    def drive() -> None:
        for count in range(1, rounds + 1):
            there.advance(count)
            back.wait(count)
        done.set()

    driver = threading.Thread(target=drive)
    driver.start()
    await_event(done, "the last echo")
    thread.join(20)
    driver.join(20)
