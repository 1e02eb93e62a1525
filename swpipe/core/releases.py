"""Which attributes of the context go where, as compiled from a plan that says what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Release:
    """What goes at one place.

    Attributes:
        after: The place is after the task's turn; else before it.
        names: The attributes.
        others: All go, too, that no task is known to use.
        behind: Tasks such that, when the device has done their work on the iteration, it has done
            that of all tasks that come before the place. Their events are recorded.
    """

    after: bool
    names: tuple[str, ...]
    others: bool
    behind: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Releases:
    """What goes in one iteration.

    Attributes:
        kept: The attributes that stay.
        at: Task to what goes there; the rest goes at the end of the iteration.
        why: Attribute to why it is gone, in words.
        why_others: The same of all that are not in it.
    """

    kept: frozenset[str]
    at: Mapping[str, tuple[Release, ...]]
    why: Mapping[str, str]
    why_others: str
