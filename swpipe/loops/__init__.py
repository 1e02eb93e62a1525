"""What a plain loop gets: work ahead of it, resume in mid-pass, Accelerate's flags, a stop."""

from swpipe.loops.accelerate import AccelerateLoader
from swpipe.loops.ahead_loop import AheadLoop, ahead
from swpipe.loops.overlapping import Overlap, OverlappedLoop, overlap
from swpipe.loops.resumable import Resumable, ResumableLoop
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
