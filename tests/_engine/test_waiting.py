"""A counter wakes those whose count is reached, at once, and nobody else."""

from __future__ import annotations

import threading

import pytest

from swpipe._engine.waiting import Cancelled, ProgressCounter
from tests.support.sequencer import await_event


def waiter(counter: ProgressCounter, count: int) -> tuple[threading.Thread, list[str]]:
    """Start a thread that waits for ``count`` and notes how the wait ended."""
    ended: list[str] = []

    def wait() -> None:
        try:
            counter.wait(count)
        except Cancelled:
            ended.append("cancelled")
        else:
            ended.append("served")

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, ended


def test_advancing_wakes_those_served_and_leaves_the_others_asleep() -> None:
    """Each waiter sleeps until its own count."""
    counter = ProgressCounter()
    first, first_ended = waiter(counter, 1)
    second, second_ended = waiter(counter, 2)
    counter.advance(1)
    first.join(20)
    assert first_ended == ["served"]
    assert second_ended == []
    counter.advance(2)
    second.join(20)
    assert second_ended == ["served"]


def test_cancelling_wakes_everyone_and_refuses_later_waits() -> None:
    """A wait for a count that has been reached returns at once; other waits raise."""
    counter = ProgressCounter()
    thread, ended = waiter(counter, 5)
    counter.advance(2)
    counter.cancel()
    thread.join(20)
    assert ended == ["cancelled"]
    counter.wait(2)
    counter.wait(-2)
    with pytest.raises(Cancelled):
        counter.wait(3)


def test_a_counter_forgets_who_has_waited() -> None:
    """This holds for every way to end a wait: a long run waits a million times."""
    counter = ProgressCounter()
    for count in range(1, 10):
        thread, _ = waiter(counter, count)
        counter.advance(count)
        thread.join(20)
    assert not counter.reaches(10, 1e-6)
    counter.cancel()
    with pytest.raises(Cancelled):
        counter.wait(10)
    assert not counter._waiters


def test_no_wake_up_is_lost_under_contention() -> None:
    """A reader and a writer that race over every count both reach the end."""
    there, back = ProgressCounter(), ProgressCounter()
    rounds, done = 1000, threading.Event()

    def echo() -> None:
        for count in range(1, rounds + 1):
            there.wait(count)
            back.advance(count)

    def drive() -> None:
        for count in range(1, rounds + 1):
            there.advance(count)
            back.wait(count)
        done.set()

    threads = [threading.Thread(target=target) for target in (echo, drive)]
    for thread in threads:
        thread.start()
    await_event(done, "the last echo")
    for thread in threads:
        thread.join(20)
