"""Which attributes of a context other threads set or delete while one thread watches it.

Tasks of one iteration that no dependence orders may run at the same time, on one context. What the
others do meanwhile must not be taken for the work of the watched one. As a rule nobody watches, and
setting an attribute costs what it always does; while somebody does, the context has a class that
takes notes::

    watching thread      another thread       noted
    enter
      ctx.y = ...                             own: y
                         ctx.z = ...          others: z    before it is done, so that whoever
      what differs? y, z                                   sees the attribute sees the note too
    exit                                      of y and z, y is the watching thread's

A thread that a task starts by itself is another thread here. Contexts whose class cannot be changed
(``SimpleNamespace``) are not watched; the engine's own can be.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

_LOCK = threading.Lock()
_WATCHERS: dict[int, tuple[Bindings, ...]] = {}
"""Who watches a context, by its id; the context lives for as long as somebody does."""


class Bindings:
    """Watches a context within a ``with`` block."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._thread = threading.get_ident()
        self._own: set[str] = set()
        self._others: set[str] = set()

    def only_by_others(self, name: str) -> bool:
        """Whether other threads set or deleted an attribute, and the watching one did not."""
        return name in self._others and name not in self._own

    def note(self, name: str) -> None:
        """The calling thread is about to set or delete an attribute."""
        (self._own if threading.get_ident() == self._thread else self._others).add(name)

    def __enter__(self) -> Bindings:
        with _LOCK:
            watchers = _WATCHERS.get(id(self._ctx), ())
            _WATCHERS[id(self._ctx)] = (*watchers, self)
            if not watchers:
                plain: Any = type(self._ctx)
                _change_class(self._ctx, _noting(plain))
        return self

    def __exit__(self, *failure: object) -> None:
        with _LOCK:
            watchers = tuple(w for w in _WATCHERS.pop(id(self._ctx)) if w is not self)
            if watchers:
                _WATCHERS[id(self._ctx)] = watchers
            elif plain := vars(type(self._ctx)).get("_plain"):
                _change_class(self._ctx, plain)


@cache
def _noting(plain: Any) -> Any:
    """A subclass of a context's class that tells the watchers what is set or deleted."""

    class Noting(plain):  # type: ignore[misc]
        __slots__ = ()
        _plain = plain

        def __setattr__(self, name: str, value: Any) -> None:
            for watcher in _WATCHERS.get(id(self), ()):
                watcher.note(name)
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            for watcher in _WATCHERS.get(id(self), ()):
                watcher.note(name)
            super().__delattr__(name)

    Noting.__name__, Noting.__qualname__ = plain.__name__, plain.__qualname__
    return Noting


def _change_class(ctx: Any, cls: type) -> None:
    try:
        object.__setattr__(ctx, "__class__", cls)
    except TypeError:
        return  # not watched, see above
