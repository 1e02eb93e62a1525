"""The places where attributes of the context are deleted, compiled from a plan with ``keep``."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from swpipe.core.context import TypedContext
from swpipe.core.messages import listed
from swpipe.errors import Problem


@dataclass(frozen=True, slots=True)
class Release:
    """The attributes that are deleted at one place.

    Attributes:
        after: Whether the place is after the task's turn; else before it.
        names: The attributes.
        behind: Tasks whose device work comes last: when the device has done it, it has done the
            work of all tasks before the place. Their events are recorded. Empty if all work is on
            one stream, or there is no device.
    """

    after: bool
    names: tuple[str, ...]
    behind: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Releases:
    """The attributes that are deleted in one iteration.

    Attributes:
        kept: The attributes that stay.
        uses: Task to the attributes that it is known to use; None if it may use any.
        at: Task to its places; all other attributes are deleted at the end of the iteration.
        why: Attribute to the reason why it is gone.
        why_others: The reason for attributes without an entry in ``why``, which are deleted at the
            end of the iteration.
        serially: The releases of an iteration that is run serially; None in the object that is
            itself for serial iterations.
    """

    kept: frozenset[str]
    uses: Mapping[str, frozenset[str] | None]
    at: Mapping[str, tuple[Release, ...]]
    why: Mapping[str, str]
    why_others: str
    serially: Releases | None = None

    def unsaid_use(self, task: str, ctx: TypedContext, used: Set[str]) -> Problem | None:
        """Return a problem if a task used attributes that may be gone, since no use was known."""
        known = self.uses.get(task)
        unsaid = [] if known is None else sorted(used - known - self.kept)
        # Methods and properties of the context's class are never deleted.
        unsaid = [name for name in unsaid if not hasattr(type(ctx), name)]
        if not unsaid:
            return None
        return Problem(
            f"check_effects: task {task!r} on iteration {ctx.iter_idx} used {listed(unsaid)}, "
            "which it does not declare, so that the plan's keep may release it too early. Add it "
            f"to reads of task {task!r}, or to keep",
            (task,),
        )
