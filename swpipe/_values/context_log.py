"""A log of a thread's accesses to the attributes of a context, and of other threads' changes.

Tasks of one iteration without dependences between them may run at the same time on one context, and
the actions of one must not be attributed to another. Usually nobody logs, and access to an
attribute costs nothing extra; while somebody logs, the context has a subclass that logs::

    logging thread       another thread       logged
    enter
      ctx.y = ctx.x                           reads: x; sets: y
                         ctx.z = ...          by others: z    before it is set, so that a thread
      what differs? y, z                                      that sees the attribute sees the entry
    exit                                      of y and z, y is the logging thread's

A thread that a task starts counts as another thread. Contexts whose class cannot be changed
(``SimpleNamespace``) are not logged; the engine's own contexts can be. ``vars(ctx)`` counts as
reading everything. Accesses by methods and properties of the context's class are logged like
accesses by the task itself; methods and properties are no attributes.
"""

from __future__ import annotations

import inspect
import threading
from functools import cache
from typing import Any, Self

from swpipe._values.fingerprint import Fingerprint

# Guards entering and leaving only. Accesses read _LOGS without the lock, which is safe because its
# values are tuples that are replaced and never modified.
_LOCK = threading.Lock()
_LOGS: dict[int, tuple[AttributeLog, ...]] = {}
"""Id of a context to its logs; a log keeps its context alive."""


class AttributeLog:
    """The accesses to the attributes of a context within a ``with`` block.

    Attributes:
        reads: Attributes that the entering thread read before it set or deleted them, whether they
            existed or not; never ``iter_idx``.
        sets: Attributes that the entering thread set, for the first time or again.
        deletes: Attributes that the entering thread deleted.
        by_others: Attributes that other threads set or deleted.
    """

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._thread = threading.get_ident()
        self.reads: set[str] = set()
        self.sets: set[str] = set()
        self.deletes: set[str] = set()
        self.by_others: set[str] = set()

    def only_by_others(self, name: str) -> bool:
        """Return whether only other threads set or deleted an attribute."""
        return name in self.by_others and name not in self.sets and name not in self.deletes

    def __enter__(self) -> Self:
        with _LOCK:
            logs = _LOGS.get(id(self._ctx), ())
            _LOGS[id(self._ctx)] = (*logs, self)
            # The first log changes the context's class; a nested one finds it changed.
            if not logs:
                original: Any = type(self._ctx)
                _set_class(self._ctx, _logging(original))
        return self

    def __exit__(self, *failure: object) -> None:
        with _LOCK:
            logs = tuple(log for log in _LOGS.pop(id(self._ctx)) if log is not self)
            if logs:
                _LOGS[id(self._ctx)] = logs
            # The last log restores the class. A class that could not be changed has no _original.
            elif original := vars(type(self._ctx)).get("_original"):
                _set_class(self._ctx, original)

    def _read(self, name: str) -> None:
        if threading.get_ident() == self._thread:
            if name == "__dict__":
                names = {*attributes(self._ctx)}
            else:
                names = {name} if _is_stored(self._ctx, name) else set()
            self.reads |= names - self.sets - self.deletes - {"iter_idx"}

    def _write(self, name: str, own: set[str]) -> None:
        (own if threading.get_ident() == self._thread else self.by_others).add(name)


class ContextWatch(AttributeLog):
    """A log that also finds changes made directly in ``vars(ctx)``, or in place.

    An attribute is modified in place if anything inside it is (``swpipe._values.fingerprint``). Not
    counted are values of parameters, which belong to their module; values that an object with a
    ``record_stream`` method computes lazily into a private attribute that was None; and attributes
    that only other threads set or deleted. In-place changes by other threads cannot be told apart:
    tasks that run at the same time must not modify each other's objects.

    Args:
        ctx: The context.
        objects: Whether to look at values other than tensors and containers, too.

    Attributes:
        before: The attributes at the start of the block.
        produced: Attributes that were added, rebound or modified in place; set at the block's end.
        deleted: Attributes that were deleted; set at the block's end.
    """

    def __init__(self, ctx: Any, *, objects: bool = True) -> None:
        super().__init__(ctx)
        self._objects = objects
        self.before: dict[str, Any] = {}
        self.produced: tuple[str, ...] = ()
        self.deleted: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        super().__enter__()
        self.before = attributes(self._ctx)  # other threads may set attributes at any time
        # The values are referenced, so that no new object can have the id of one of them.
        self._prints = {
            name: Fingerprint(value, objects=self._objects) for name, value in self.before.items()
        }
        return self

    def __exit__(self, *failure: object) -> None:
        after = attributes(self._ctx)
        # Only after the copy: what another thread sets until then is in by_others, and not
        # produced.
        super().__exit__()
        before = self._prints
        foreign = self.only_by_others
        self.produced = tuple(
            name
            for name, value in after.items()
            if (name not in before or before[name].value is not value or before[name].changed())
            and not foreign(name)
        )
        self.deleted = tuple(name for name in before if name not in after and not foreign(name))


def attributes(ctx: Any) -> dict[str, Any]:
    """Return a copy of the context's attributes, made atomically and without logging a read."""
    return dict(object.__getattribute__(ctx, "__dict__"))


@cache
def _logging(original: Any) -> Any:
    """Return a subclass of a context's class that logs.

    The subclass adds nothing to its instances, so that a context can get its own class back, even
    while another thread is within these methods. They therefore name that class instead of calling
    ``super()``.
    """

    class Logging(original):  # type: ignore[misc]
        __slots__ = ()
        _original = original

        def __getattribute__(self, name: str) -> Any:
            for log in _LOGS.get(id(self), ()):
                log._read(name)
            return original.__getattribute__(self, name)

        def __setattr__(self, name: str, value: Any) -> None:
            for log in () if _is_computed(original, name) else _LOGS.get(id(self), ()):
                log._write(name, log.sets)
            # Logged first: a thread that sees the attribute also sees the log's entry (drawing
            # above).
            original.__setattr__(self, name, value)

        def __delattr__(self, name: str) -> None:
            for log in () if _is_computed(original, name) else _LOGS.get(id(self), ()):
                log._write(name, log.deletes)
            original.__delattr__(self, name)

    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(Logging, name, getattr(original, name))
    return Logging


def _is_stored(ctx: Any, name: str) -> bool:
    """Return whether a name is an attribute's: in ``vars(ctx)``, missing, or a class's default."""
    if name in object.__getattribute__(ctx, "__dict__"):
        return True
    member = inspect.getattr_static(type(ctx), name, None)
    return not (name.startswith("__") or hasattr(type(member), "__get__"))


def _is_computed(cls: type, name: str) -> bool:
    """Return whether the class computes the attribute, as a property does.

    A data descriptor takes precedence over ``vars(ctx)``.
    """
    return inspect.isdatadescriptor(inspect.getattr_static(cls, name, None))


def _set_class(ctx: Any, cls: type) -> None:
    """Change the class of a context, if the class allows it."""
    try:
        object.__setattr__(ctx, "__class__", cls)
    except TypeError:
        return  # this context is not logged
