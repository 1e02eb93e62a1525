"""What a plain loop gets: work ahead of it, resume, ranks that end together, a stop."""

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
from swpipe.loops.stateful_loader import StatefulLoader

if TYPE_CHECKING:
    from swpipe.loops.stop_request import StopRequest, WatchedLoop
    from swpipe.loops.through_loop import OnCaller, ThroughLoop, on_caller, through

__all__ = [
    "AccelerateLoader",
    "AheadLoop",
    "EvenData",
    "EvenIterator",
    "EvenLoader",
    "OnCaller",
    "OutOfStepError",
    "Overlap",
    "OverlappedLoop",
    "RankDataError",
    "Resumable",
    "ResumableLoop",
    "StatefulLoader",
    "StopRequest",
    "ThroughLoop",
    "UnevenDataError",
    "WatchedLoop",
    "ahead",
    "on_caller",
    "overlap",
    "pad_with",
    "pad_with_last",
    "through",
]

if not TYPE_CHECKING:  # which would take each name for Any

    def __getattr__(name: str) -> Any:
        """What few loops use, loaded when asked for."""
        if name in ("StopRequest", "WatchedLoop"):
            from swpipe.loops import stop_request

            return getattr(stop_request, name)
        if name in ("OnCaller", "ThroughLoop", "on_caller", "through"):
            from swpipe.loops import through_loop

            return getattr(through_loop, name)
        raise AttributeError(f"module 'swpipe.loops' has no attribute {name!r}")
