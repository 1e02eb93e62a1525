"""What a task did to its context: attributes added, rebound, deleted, or modified in place.

An attribute is modified in place if anything inside it is (``swpipe._values.fingerprint``).

Not counted: values of parameters, which belong to their module; what an object with a
``record_stream`` method computes lazily into a private attribute that was None; and attributes that
only other threads set or deleted (``swpipe._values.context_log``). In-place changes by other
threads cannot be told apart: tasks that run at the same time must not modify each other's objects.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from swpipe._values.context_log import AttributeLog, attributes
from swpipe._values.fingerprint import Fingerprint


class ContextChanges(NamedTuple):
    """Names of attributes; ``produced`` were added, rebound or modified in place."""

    produced: tuple[str, ...]
    deleted: tuple[str, ...]


class ContextWatch:
    """Finds what the thread that enters a ``with`` block changes on a context within it.

    ``before`` has the attributes at the start of the block; ``changes`` is set at its end.
    """

    changes: ContextChanges

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._log = AttributeLog(ctx)
        self.before: dict[str, Any] = {}
        self._prints: dict[str, Fingerprint] = {}

    def __enter__(self) -> ContextWatch:
        self._log.__enter__()
        self.before = attributes(self._ctx)  # other threads may set attributes at any time
        # The values are referenced, so that no new object can have the id of one of them.
        self._prints = {name: Fingerprint(value) for name, value in self.before.items()}
        return self

    def __exit__(self, *failure: object) -> None:
        after = attributes(self._ctx)
        self._log.__exit__()
        before, foreign = self._prints, self._log.only_by_others
        produced = tuple(
            name
            for name, value in after.items()
            if (name not in before or before[name].value is not value or before[name].changed())
            and not foreign(name)
        )
        deleted = tuple(name for name in before if name not in after and not foreign(name))
        self.changes = ContextChanges(produced, deleted)
