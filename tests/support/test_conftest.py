"""The net under the other tests holds."""

from __future__ import annotations

import threading

from tests.conftest import left_behind


def test_a_thread_of_swpipe_that_still_runs_is_seen() -> None:
    """A swpipe thread counts as left behind while it runs, daemon or not, and not once it ended."""
    before, release = set(threading.enumerate()), threading.Event()
    thread = threading.Thread(target=release.wait, name="swpipe-io", daemon=True)
    thread.start()
    assert left_behind(before) == [thread]
    release.set()
    thread.join()
    assert left_behind(before) == []


def test_a_foreign_daemon_thread_is_left_alone() -> None:
    """A library's daemon thread is its own business; a thread that would block exit is not."""
    before, release = set(threading.enumerate()), threading.Event()
    foreign = threading.Thread(target=release.wait, name="tqdm-monitor", daemon=True)
    blocking = threading.Thread(target=release.wait, name="forgotten")
    foreign.start()
    blocking.start()
    assert left_behind(before) == [blocking]
    release.set()
    foreign.join()
    blocking.join()
