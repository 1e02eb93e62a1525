"""Loops: work ahead of a plain loop, resume, ranks that end together, and a stop from outside."""

from typing import TYPE_CHECKING, Any

from swpipe._distributed.even_data import (
    EvenData,
    EvenIterator,
    EvenLoader,
    OutOfStepError,
    RankDataError,
    UnevenDataError,
    pad_with,
    pad_with_last,
)
from swpipe.loops.accelerate import AccelerateLoader
from swpipe.loops.ahead_loop import AheadLoop, ahead
from swpipe.loops.overlapping import Overlap, OverlappedLoop, overlap
from swpipe.loops.resumable import Resumable, ResumableLoop

if TYPE_CHECKING:
    from swpipe.loops.stop_request import StopRequest, WatchedLoop

__all__ = [
    "AccelerateLoader",
    "AheadLoop",
    "EvenData",
    "EvenIterator",
    "EvenLoader",
    "OutOfStepError",
    "Overlap",
    "OverlappedLoop",
    "RankDataError",
    "Resumable",
    "ResumableLoop",
    "StopRequest",
    "UnevenDataError",
    "WatchedLoop",
    "ahead",
    "overlap",
    "pad_with",
    "pad_with_last",
]

# Type checkers do not see this function, which would make each unknown name an Any.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Load the classes that few loops use at their first access."""
        # Loading stop_request registers handlers for each fork of the process.
        if name in ("StopRequest", "WatchedLoop"):
            from swpipe.loops import stop_request

            return getattr(stop_request, name)
        raise AttributeError(f"module 'swpipe.loops' has no attribute {name!r}")
