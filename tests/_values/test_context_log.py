"""Changes to a context by other threads are distinguished from the logging thread's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from swpipe._values import context_log
from swpipe._values.context_log import AttributeLog
from swpipe.core.context import IterContext


def context() -> IterContext:
    ctx = IterContext(None, 3)
    ctx.old = 1
    return ctx


def elsewhere(act: Callable[[], None]) -> None:
    """Run something on another thread, and wait for it."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(10)


def test_writes_of_other_threads_are_logged() -> None:
    """An attribute that the watching thread wrote, too, counts as its own."""
    ctx = context()

    def act() -> None:
        ctx.theirs = ctx.both = ctx.batch
        del ctx.old

    with AttributeLog(ctx) as log:
        ctx.own = ctx.both = 2
        elsewhere(act)
    names = ("theirs", "old", "own", "both", "batch")
    assert [log.only_by_others(name) for name in names] == [True, True, False, False, False]
    assert (log.reads, log.sets, log.deletes) == (set(), {"own", "both"}, set())


def test_a_watched_context_behaves_as_usual() -> None:
    """It is an IterContext by name and kind, attributes can be set, and its error still helps."""
    ctx = context()
    with AttributeLog(ctx):
        assert isinstance(ctx, IterContext)
        assert type(ctx).__name__ == "IterContext"
        ctx.new = 1
        del ctx.old
        with pytest.raises(AttributeError, match="iteration 3 has no attribute 'old'"):
            _ = ctx.old
        with pytest.raises(AttributeError):
            del ctx.old
    assert vars(ctx) == {"batch": None, "iter_idx": 3, "new": 1}


def test_the_class_is_restored_when_the_last_watcher_exits() -> None:
    """It is restored after a failure, too; two may watch one context and exit in any order."""
    ctx = context()
    first, second = AttributeLog(ctx), AttributeLog(ctx)
    with first:
        second.__enter__()
    ctx.late = 1
    assert type(ctx) is not IterContext
    second.__exit__()
    assert type(ctx) is IterContext
    assert id(ctx) not in context_log._LOGS
    assert not first.only_by_others("late")
    with pytest.raises(KeyError), AttributeLog(ctx):
        raise KeyError
    assert type(ctx) is IterContext


def test_two_watching_threads_have_separate_logs() -> None:
    """The writes of one thread are foreign to the other thread."""
    ctx = context()
    notes: list[AttributeLog] = []
    inside, go_on = threading.Event(), threading.Event()

    def watch() -> None:
        with AttributeLog(ctx) as log:
            notes.append(log)
            ctx.a = 1
            inside.set()
            assert go_on.wait(10)

    thread = threading.Thread(target=watch)
    with AttributeLog(ctx) as log:
        thread.start()
        assert inside.wait(10)
        ctx.b = 2
        go_on.set()
        thread.join(10)
    assert [log.only_by_others(name) for name in "ab"] == [True, False]
    assert [notes[0].only_by_others(name) for name in "ab"] == [False, True]


def test_a_context_whose_class_cannot_change_is_not_logged() -> None:
    """It works as usual; nothing is logged."""
    ctx = SimpleNamespace()
    with AttributeLog(ctx) as log:
        elsewhere(lambda: setattr(ctx, "theirs", 1))
    assert type(ctx) is SimpleNamespace
    assert not log.only_by_others("theirs")
