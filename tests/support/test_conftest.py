"""The checks after each test work."""

from __future__ import annotations

import gc
import threading

from tests.conftest import left_behind
from tests.support import garbage


def test_a_thread_of_swpipe_that_still_runs_is_seen() -> None:
    """A swpipe thread counts as left behind while it runs, daemon or not."""
    before, release = set(threading.enumerate()), threading.Event()
    thread = threading.Thread(target=release.wait, name="swpipe-io", daemon=True)
    thread.start()
    assert left_behind(before) == [thread]
    release.set()
    thread.join()
    assert left_behind(before) == []


def test_a_foreign_daemon_thread_is_left_alone() -> None:
    """A library's daemon thread is ignored; a thread that would block exit is not."""
    before, release = set(threading.enumerate()), threading.Event()
    foreign = threading.Thread(target=release.wait, name="tqdm-monitor", daemon=True)
    blocking = threading.Thread(target=release.wait, name="forgotten")
    foreign.start()
    blocking.start()
    assert left_behind(before) == [blocking]
    release.set()
    foreign.join()
    blocking.join()


def is_searched(value: object) -> bool:
    """Return whether the collector searches an object."""
    return any(searched is value for searched in gc.get_objects())


def test_many_objects_are_searched_once() -> None:
    """Later collections leave them out; few objects stay with the collector."""
    garbage.freeze()
    few: list[object] = []
    garbage.freeze_if_many()
    assert is_searched(few)
    many: list[list[object]] = [[] for _ in range(garbage.MANY)]
    garbage.freeze_if_many()
    assert not is_searched(many[-1])
    assert not is_searched(few)
