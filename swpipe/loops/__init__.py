"""What a plain loop gets: work ahead of it, resume in mid-pass, Accelerate's flags, a stop."""

from typing import TYPE_CHECKING, Any

from swpipe.loops.accelerate import AccelerateLoader
from swpipe.loops.ahead_loop import AheadLoop, ahead
from swpipe.loops.overlapping import Overlap, OverlappedLoop, overlap
from swpipe.loops.resumable import Resumable, ResumableLoop

if TYPE_CHECKING:
    from swpipe.loops.stop_request import StopRequest, WatchedLoop

__all__ = [
    "AccelerateLoader",
    "AheadLoop",
    "Overlap",
    "OverlappedLoop",
    "Resumable",
    "ResumableLoop",
    "StopRequest",
    "WatchedLoop",
    "ahead",
    "overlap",
]

if not TYPE_CHECKING:  # which would take each name for Any

    def __getattr__(name: str) -> Any:
        """What few loops use, loaded when asked for."""
        if name in ("StopRequest", "WatchedLoop"):
            from swpipe.loops import stop_request

            return getattr(stop_request, name)
        raise AttributeError(f"module 'swpipe.loops' has no attribute {name!r}")
