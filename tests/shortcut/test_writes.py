"""What other threads set on a watched context is told apart from what the watching thread sets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from swpipe.core.context import IterContext
from swpipe.shortcut.writes import AttributeWrites


def context() -> IterContext:
    ctx = IterContext(None, 3)
    ctx.old = 1
    return ctx


def elsewhere(act: Callable[[], None]) -> None:
    """Runs something on another thread, to the end."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(10)


def test_what_other_threads_set_and_delete_is_noted() -> None:
    """Theirs alone is theirs; what the watching thread touched as well is its own."""
    ctx = context()

    def act() -> None:
        ctx.theirs = ctx.both = 1
        del ctx.old

    with AttributeWrites(ctx) as bindings:
        ctx.own = ctx.both = 2
        elsewhere(act)
    names = ("theirs", "old", "own", "both", "batch")
    assert [bindings.only_by_others(name) for name in names] == [True, True, False, False, False]


def test_a_context_behaves_as_ever_while_it_is_watched() -> None:
    """It is an IterContext by name and kind, attributes come and go, and the error still helps."""
    ctx = context()
    with AttributeWrites(ctx):
        assert isinstance(ctx, IterContext)
        assert type(ctx).__name__ == "IterContext"
        ctx.new = 1
        del ctx.old
        with pytest.raises(AttributeError, match="iteration 3 has no attribute 'old'"):
            _ = ctx.old
        with pytest.raises(AttributeError):
            del ctx.old
    assert vars(ctx) == {"batch": None, "iter_idx": 3, "new": 1}


def test_its_class_comes_back_when_the_last_watcher_leaves() -> None:
    """Also after a failure; two may watch one context, in any order of leaving."""
    ctx = context()
    first, second = AttributeWrites(ctx), AttributeWrites(ctx)
    with first:
        second.__enter__()
    ctx.late = 1
    assert type(ctx) is not IterContext
    second.__exit__()
    assert type(ctx) is IterContext
    assert not first.only_by_others("late")
    with pytest.raises(KeyError), AttributeWrites(ctx):
        raise KeyError
    assert type(ctx) is IterContext


def test_two_threads_that_watch_one_context_have_notes_of_their_own() -> None:
    """What is the one's own is the other's foreign."""
    ctx = context()
    notes: list[AttributeWrites] = []
    inside, go_on = threading.Event(), threading.Event()

    def watch() -> None:
        with AttributeWrites(ctx) as bindings:
            notes.append(bindings)
            ctx.a = 1
            inside.set()
            assert go_on.wait(10)

    thread = threading.Thread(target=watch)
    with AttributeWrites(ctx) as bindings:
        thread.start()
        assert inside.wait(10)
        ctx.b = 2
        go_on.set()
        thread.join(10)
    assert [bindings.only_by_others(name) for name in "ab"] == [True, False]
    assert [notes[0].only_by_others(name) for name in "ab"] == [False, True]


def test_a_context_whose_class_cannot_change_is_let_be() -> None:
    """It works as ever; only nothing is noted."""
    ctx = SimpleNamespace()
    with AttributeWrites(ctx) as bindings:
        elsewhere(lambda: setattr(ctx, "theirs", 1))
    assert type(ctx) is SimpleNamespace
    assert not bindings.only_by_others("theirs")


def test_nothing_is_left_of_a_watch() -> None:
    """No watcher stays behind for the next object that gets the context's id."""
    from swpipe.shortcut import writes as module

    with AttributeWrites(context()):
        pass
    assert module._WATCHERS == {}
