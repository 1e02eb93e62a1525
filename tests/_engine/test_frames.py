"""Whether a block is still executed is read from its frame, and from no other thread's stack."""

from __future__ import annotations

import ast
import sys
import threading

import pytest

from swpipe._engine.exclusive import is_executed
from tests.test_doors import PACKAGE, modules


def test_a_frame_is_executed_until_its_function_ends() -> None:
    """By return and by an exception; a frame that called another one is executed as well."""
    seen = []

    def ends(error: type[BaseException] | None) -> None:
        seen.append(sys._getframe())
        assert is_executed(seen[-1])
        assert is_executed(sys._getframe(1))
        if error is not None:
            raise error

    ends(None)
    with pytest.raises(KeyboardInterrupt):
        ends(KeyboardInterrupt)
    assert [is_executed(frame) for frame in seen] == [False, False]


def test_a_frame_of_another_thread_is_executed_until_that_ends() -> None:
    """Whoever waits for another thread's block asks this."""
    seen, begun, end = [], threading.Event(), threading.Event()

    def waits() -> None:
        seen.append(sys._getframe())
        begun.set()
        end.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    begun.wait()
    assert is_executed(seen[0])
    end.set()
    thread.join()
    assert not is_executed(seen[0])


def test_only_the_report_of_a_stall_reads_the_stacks_of_other_threads() -> None:
    """CPython 3.11 crashed where ``close``, in a signal handler, read that of an ending thread.

    About one in 5,000 handlers that closed a pipeline ended the process by a segmentation fault.
    """
    readers = {
        path.as_posix()
        for path, tree in modules(PACKAGE)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "_current_frames"
    }
    assert readers == {"_engine/watchdog.py"}
