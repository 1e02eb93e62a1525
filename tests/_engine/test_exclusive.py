"""One call at a time, whoever was cut short before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from swpipe._engine.exclusive import ExclusiveAccess


def cut_short(access: ExclusiveAccess) -> None:
    """A call that enters, and never leaves."""
    access.enter(sys._getframe())


def elsewhere(access: ExclusiveAccess, frame: FrameType) -> bool:
    """Whether another thread may enter."""
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


def test_a_call_is_alone_until_it_leaves() -> None:
    """Another thread is refused meanwhile, and let in afterwards."""
    access, frame = ExclusiveAccess(), sys._getframe()
    access.enter(frame)
    assert not elsewhere(access, frame)
    access.leave()
    assert elsewhere(access, frame)


def test_a_call_that_was_cut_short_keeps_nobody_out() -> None:
    """Its frame is no longer executed: the next call takes over, and is alone."""
    access = ExclusiveAccess()
    cut_short(access)
    access.enter(sys._getframe())
    assert access.holder() == threading.get_ident()
    assert not elsewhere(access, sys._getframe())


def test_one_of_two_that_take_over_at_once_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one found the call that was cut short, too, and has been quicker."""
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
