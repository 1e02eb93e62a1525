"""One call at a time, even after an interrupted call; a call's frame tells whether it runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from swpipe._engine.exclusive import ExclusiveAccess, is_executed
from swpipe.device import resolve
from swpipe.inference.operators import OperatorRecorder
from tests.test_layout import PACKAGE


def cut_short(access: ExclusiveAccess) -> None:
    """Enter, and return without leaving, as an interrupted call does."""
    access.enter(sys._getframe())


def elsewhere(access: ExclusiveAccess, frame: FrameType) -> bool:
    """Return whether another thread may enter."""
    entered: list[bool] = []

    def enter() -> None:
        try:
            access.enter(frame)
        except RuntimeError:
            entered.append(False)
        else:
            entered.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10)
    return entered == [True]


def test_a_call_that_was_cut_short_keeps_nobody_out() -> None:
    """Its frame is no longer executed: the next call takes over, and is alone until it ends."""
    access = ExclusiveAccess()
    cut_short(access)
    access.enter(sys._getframe())
    assert access.holder() == threading.get_ident()
    assert not elsewhere(access, sys._getframe())
    access.leave()
    assert elsewhere(access, sys._getframe())


def test_one_of_two_that_take_over_at_once_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other call also found the interrupted call, and was faster."""
    access, frame = ExclusiveAccess(), sys._getframe()
    cut_short(access)

    @contextmanager
    def late() -> Iterator[None]:
        monkeypatch.undo()
        assert elsewhere(access, frame)
        yield

    monkeypatch.setattr(access, "_lock", late())
    with pytest.raises(RuntimeError, match="in use already"):
        access.enter(frame)
    assert access.holder() != threading.get_ident()


def test_a_frame_is_executed_until_its_function_ends() -> None:
    """It ends by return or by an exception; a frame that called another one is executed, too."""
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
    """A thread that waits for another thread's block relies on this."""
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
    """CPython 3.11 crashed if ``close`` in a signal handler read the stack of an ending thread.

    About one in 5,000 handlers that closed a pipeline ended the process by a segmentation fault.
    """
    readers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "_current_frames(" in path.read_text(encoding="utf-8")
    }
    assert readers == {"_engine/watchdog.py", "_distributed/pull_limit.py"}


def test_a_call_takes_away_what_watched_its_tasks_and_nothing_else() -> None:
    """An interrupt has left the watch on the thread; the user's mode stays as it was."""
    access, own = ExclusiveAccess(), TorchDispatchMode()
    with own:
        access.enter(sys._getframe())
        for _ in range(2):
            OperatorRecorder(resolve("cpu")).__enter__()
        access.leave()
        assert _get_current_dispatch_mode_stack() == [own]
    assert _get_current_dispatch_mode_stack() == []
