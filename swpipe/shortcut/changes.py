"""What a task did to its context: attributes added, rebound, deleted, or modified in place.

An attribute is modified in place if anything inside it is (``swpipe._tensors.content``).

Not counted: values of parameters, which belong to their module; what an object with a
``record_stream`` method computes lazily into a private attribute that was None; and attributes that
only other threads set or deleted (``swpipe.shortcut.writes``). In-place changes by other threads
cannot be told apart: tasks that run at the same time must not modify each other's objects.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from swpipe._tensors.content import Content
from swpipe.shortcut.writes import AttributeWrites


class Changes(NamedTuple):
    """Names of attributes; ``produced`` were added, rebound or modified in place."""

    produced: tuple[str, ...]
    deleted: tuple[str, ...]


class ContextWatch:
    """Finds what the thread that enters a ``with`` block changes on a context within it.

    ``before`` has the attributes at the start of the block; ``changes`` is set at its end.
    """

    changes: Changes

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._writes = AttributeWrites(ctx)
        self.before: dict[str, Any] = {}
        self._contents: dict[str, Content] = {}

    def __enter__(self) -> ContextWatch:
        self._writes.__enter__()
        # One atomic copy: other threads may set attributes at any time.
        self.before = dict(vars(self._ctx))
        # The values are referenced, so that no new object can have the id of one of them.
        self._contents = {name: Content(value) for name, value in self.before.items()}
        return self

    def __exit__(self, *failure: object) -> None:
        after = dict(vars(self._ctx))
        self._writes.__exit__()
        before, foreign = self._contents, self._writes.only_by_others
        produced = tuple(
            name
            for name, value in after.items()
            if (name not in before or before[name].value is not value or before[name].modified())
            and not foreign(name)
        )
        deleted = tuple(name for name in before if name not in after and not foreign(name))
        self.changes = Changes(produced, deleted)
