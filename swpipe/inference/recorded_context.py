"""An iteration context that records which of its attributes a task reads, sets and deletes."""

from __future__ import annotations

import inspect
import threading
from typing import Any

from swpipe.core.context import TypedContext


class AttributeLog:
    """What one task does to the attributes of its context.

    Attributes:
        reads: Attributes read before the task set or deleted them, whether they existed or not;
            never ``iter_idx``.
        sets: Attributes set, for the first time or again.
        deletes: Attributes deleted.
    """

    def __init__(self) -> None:
        self.reads: set[str] = set()
        self.sets: set[str] = set()
        self.deletes: set[str] = set()

    def read(self, *names: str) -> None:
        """Record that the task reads attributes."""
        self.reads.update(set(names) - self.sets - self.deletes - {"iter_idx"})

    def compare(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Record what was set or deleted directly in the context's ``__dict__``."""
        self.sets |= {n for n, v in after.items() if n not in before or before[n] is not v}
        self.deletes |= before.keys() - after.keys()


def recorded_class(context: type[TypedContext]) -> type[TypedContext]:
    """A subclass of the user's context class, with an ``AttributeLog``.

    ``vars(ctx)`` counts as reading everything. What methods and properties of the user's class do
    to attributes is recorded like what the task itself does; methods and properties are no
    attributes. The class adds nothing to its instances, so that a context can be made one of the
    user's class again: also while another thread is within these methods, which is why they name
    that class instead of asking ``super()``.
    """
    user: Any = context

    class Recorded(user):  # type: ignore[misc]
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            if (log := _log(self)) is not None:
                if name == "__dict__":
                    log.read(*attributes(self))
                elif _is_stored(self, name):
                    log.read(name)
            return user.__getattribute__(self, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if (log := _log(self)) is not None and not _is_computed(user, name):
                log.sets.add(name)
            user.__setattr__(self, name, value)

        def __delattr__(self, name: str) -> None:
            user.__delattr__(self, name)
            if (log := _log(self)) is not None and not _is_computed(user, name):
                log.deletes.add(name)

        def __getattr__(self, name: str) -> Any:
            log = _log(self)
            set_log(self, None)  # the error message lists all attributes, which is not a read
            try:
                return user.__getattr__(self, name)
            finally:
                set_log(self, log)

    for own in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(Recorded, own, getattr(context, own))
    return Recorded


def _is_stored(ctx: TypedContext, name: str) -> bool:
    """Whether a name is that of an attribute: in ``vars(ctx)``, missing, or a class's default."""
    if name in object.__getattribute__(ctx, "__dict__"):
        return True
    member = inspect.getattr_static(type(ctx), name, None)
    return not (name.startswith("__") or hasattr(type(member), "__get__"))


def _is_computed(context: type[TypedContext], name: str) -> bool:
    """Whether the class computes the attribute, as a property does, whatever ``vars(ctx)`` has."""
    return inspect.isdatadescriptor(inspect.getattr_static(context, name, None))


class _Logs(threading.local):
    """The logs that are active on a thread: tasks may run at the same time.

    Attributes:
        by_context: Id of a context, which outlives its log, to the log.
    """

    def __init__(self) -> None:
        self.by_context: dict[int, AttributeLog] = {}


_LOGS = _Logs()


def _log(ctx: TypedContext) -> AttributeLog | None:
    return _LOGS.by_context.get(id(ctx))


def set_log(ctx: TypedContext, log: AttributeLog | None) -> None:
    """Record into ``log`` what this thread does from now on; with None, record nothing."""
    if log is None:
        _LOGS.by_context.pop(id(ctx), None)
    else:
        _LOGS.by_context[id(ctx)] = log


def attributes(ctx: TypedContext) -> dict[str, Any]:
    """The context's current attributes, without recording a read."""
    return dict(object.__getattribute__(ctx, "__dict__"))
