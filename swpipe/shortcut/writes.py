"""Which attributes of a context other threads set or delete while one thread watches it.

Tasks of one iteration without dependences between them may run at the same time on one context. A
change by another task must not be attributed to the watched one. Usually no thread watches, and
setting an attribute costs nothing extra; while one does, the context has a subclass that logs::

    watching thread      another thread       logged
    enter
      ctx.y = ...                             own: y
                         ctx.z = ...          others: z    before it is set, so that a thread that
      what differs? y, z                                   sees the attribute sees the log entry
    exit                                      of y and z, y is the watching thread's

A thread that a task starts counts as another thread. Contexts whose class cannot be changed
(``SimpleNamespace``) are not watched; the engine's own can be.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

_LOCK = threading.Lock()
_WATCHERS: dict[int, tuple[AttributeWrites, ...]] = {}
"""Id of a context to its watchers; a watcher keeps its context alive."""


class AttributeWrites:
    """Logs which threads write attributes of a context within a ``with`` block."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._thread = threading.get_ident()
        self._own: set[str] = set()
        self._others: set[str] = set()

    def only_by_others(self, name: str) -> bool:
        """Whether other threads set or deleted an attribute, and the watching thread did not."""
        return name in self._others and name not in self._own

    def log(self, name: str) -> None:
        """Log that the calling thread is about to set or delete an attribute."""
        (self._own if threading.get_ident() == self._thread else self._others).add(name)

    def __enter__(self) -> AttributeWrites:
        with _LOCK:
            watchers = _WATCHERS.get(id(self._ctx), ())
            _WATCHERS[id(self._ctx)] = (*watchers, self)
            if not watchers:
                original: Any = type(self._ctx)
                _set_class(self._ctx, _logging(original))
        return self

    def __exit__(self, *failure: object) -> None:
        with _LOCK:
            watchers = tuple(w for w in _WATCHERS.pop(id(self._ctx)) if w is not self)
            if watchers:
                _WATCHERS[id(self._ctx)] = watchers
            elif original := vars(type(self._ctx)).get("_original"):
                _set_class(self._ctx, original)


@cache
def _logging(original: Any) -> Any:
    """A subclass of a context's class that logs for the watchers.

    Another thread may be within its methods when the context gets its own class back, so they name
    that class instead of asking ``super()``.
    """

    class Logging(original):  # type: ignore[misc]
        __slots__ = ()
        _original = original

        def __setattr__(self, name: str, value: Any) -> None:
            for watcher in _WATCHERS.get(id(self), ()):
                watcher.log(name)
            original.__setattr__(self, name, value)

        def __delattr__(self, name: str) -> None:
            for watcher in _WATCHERS.get(id(self), ()):
                watcher.log(name)
            original.__delattr__(self, name)

    Logging.__name__, Logging.__qualname__ = original.__name__, original.__qualname__
    return Logging


def _set_class(ctx: Any, cls: type) -> None:
    try:
        object.__setattr__(ctx, "__class__", cls)
    except TypeError:
        return  # not watched, see above
