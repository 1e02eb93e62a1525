"""Which attributes of the context go where, as compiled from a plan that says what it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from swpipe.core.context import TypedContext
from swpipe.core.messages import listed
from swpipe.errors import Problem


@dataclass(frozen=True, slots=True)
class Release:
    """What goes at one place.

    Attributes:
        after: The place is after the task's turn; else before it.
        names: The attributes.
        behind: Tasks such that, when the device has done their work on the iteration, it has done
            that of all tasks that come before the place. Their events are recorded. None, if all
            work is on one stream, or there is no device.
    """

    after: bool
    names: tuple[str, ...]
    behind: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Releases:
    """What goes in one iteration.

    Attributes:
        kept: The attributes that stay.
        uses: Task to the attributes that it is known to use; None, if it may use any.
        at: Task to what goes there; the rest goes at the end of the iteration.
        why: Attribute to why it is gone, in words.
        why_others: The same of all that are not in it, which go at the end of the iteration.
        serially: What goes in an iteration that is run serially; None if that is asked of this.
    """

    kept: frozenset[str]
    uses: Mapping[str, frozenset[str] | None]
    at: Mapping[str, tuple[Release, ...]]
    why: Mapping[str, str]
    why_others: str
    serially: Releases | None = None

    def unsaid_use(self, task: str, ctx: TypedContext, used: Set[str]) -> Problem | None:
        """That a task used attributes that may have gone, since it was not known to use them."""
        known = self.uses.get(task)
        unsaid = [] if known is None else sorted(used - known - self.kept)
        unsaid = [name for name in unsaid if not hasattr(type(ctx), name)]
        if not unsaid:
            return None
        return Problem(
            f"check_effects: task {task!r} on iteration {ctx.iter_idx} used {listed(unsaid)}, "
            "which it is not known to use, so that keep may let it go before or meanwhile. Name "
            f"it in reads of task {task!r}, or in keep",
            (task,),
        )
