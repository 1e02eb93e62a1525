"""A context that tells which of its attributes are read, set and deleted."""

from __future__ import annotations

from typing import Any

from swpipe.core.context import IterContext


class AttributeLog:
    """What one task does to the attributes of its context.

    Attributes:
        reads: Asked for before the task set or deleted them itself; there or not.
        sets: Set, for the first time or anew.
        deletes: Deleted.
    """

    def __init__(self) -> None:
        self.reads: set[str] = set()
        self.sets: set[str] = set()
        self.deletes: set[str] = set()

    def read(self, *names: str) -> None:
        """Note that the task asks for attributes."""
        self.reads.update(name for name in names if name not in self.sets | self.deletes)

    def compare(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Note what was set or deleted past the context, in its ``__dict__``."""
        self.sets |= {
            name for name, value in after.items() if name not in before or before[name] is not value
        }
        self.deletes |= before.keys() - after.keys()


class RecordedContext(IterContext):
    """An ``IterContext`` that keeps an ``AttributeLog``; ``vars(ctx)`` reads all attributes."""

    __slots__ = ("_swpipe_log",)

    _swpipe_log: AttributeLog | None

    def __init__(self, batch: Any, iter_idx: int) -> None:
        object.__setattr__(self, "_swpipe_log", None)
        super().__init__(batch, iter_idx)

    def __getattribute__(self, name: str) -> Any:
        log: AttributeLog | None = object.__getattribute__(self, "_swpipe_log")
        if log is not None:
            if name == "__dict__":
                log.read(*attributes(self))
            elif not hasattr(type(self), name):
                log.read(name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        log: AttributeLog | None = object.__getattribute__(self, "_swpipe_log")
        if log is not None:
            log.sets.add(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        log: AttributeLog | None = object.__getattribute__(self, "_swpipe_log")
        if log is not None:
            log.deletes.add(name)

    def __getattr__(self, name: str) -> Any:
        log: AttributeLog | None = object.__getattribute__(self, "_swpipe_log")
        keep_log(self, None)  # the message lists all attributes; that is no reading
        try:
            return super().__getattr__(name)
        finally:
            keep_log(self, log)


def keep_log(ctx: RecordedContext, log: AttributeLog | None) -> None:
    """Let a context note in ``log`` from now on; None to note nothing."""
    object.__setattr__(ctx, "_swpipe_log", log)


def attributes(ctx: RecordedContext) -> dict[str, Any]:
    """A context's attributes as they are now, without reading them."""
    return dict(object.__getattribute__(ctx, "__dict__"))
