"""What one iteration carries from task to task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swpipe.core.messages import listed


class IterContext:
    """The state of one iteration: its batch, its number, and whatever attributes tasks set.

    Attributes:
        batch: What the user's iterator gave; any object, None included.
        iter_idx: The iteration's number in this pipeline, from 0, counted on through all iterators.
    """

    def __init__(self, batch: Any, iter_idx: int) -> None:
        self.batch = batch
        self.iter_idx = iter_idx

    if TYPE_CHECKING:  # tasks set attributes freely

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"iteration {self.__dict__.get('iter_idx')} has no attribute {name!r} "
            f"(it has: {listed(sorted(self.__dict__))}). The task that sets it has not run "
            "before this one: add the dependence to the plan, or set it in an earlier task"
        )

    def __repr__(self) -> str:
        extra = sorted(set(self.__dict__) - {"batch", "iter_idx"})
        return f"IterContext(iter_idx={self.iter_idx}, attributes={extra})"
