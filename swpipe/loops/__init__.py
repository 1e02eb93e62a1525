"""What a plain loop gets: work ahead of it, resume, ranks that end together, a stop."""

from importlib import import_module
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
    from swpipe.loops.feed_pace import Arrival
    from swpipe.loops.feed_workers import StoreWorker, serve_store, worker_processes
    from swpipe.loops.feeding import Feed, FeedBatch, FeedWorker, Sample, feed
    from swpipe.loops.stop_request import StopRequest, WatchedLoop

__all__ = [
    "AccelerateLoader",
    "AheadLoop",
    "Arrival",
    "EvenData",
    "EvenIterator",
    "EvenLoader",
    "Feed",
    "FeedBatch",
    "FeedWorker",
    "OutOfStepError",
    "Overlap",
    "OverlappedLoop",
    "RankDataError",
    "Resumable",
    "ResumableLoop",
    "Sample",
    "StopRequest",
    "StoreWorker",
    "UnevenDataError",
    "WatchedLoop",
    "ahead",
    "feed",
    "overlap",
    "pad_with",
    "pad_with_last",
    "serve_store",
    "worker_processes",
]

if not TYPE_CHECKING:  # which would take each name for Any
    _LATE = {
        **dict.fromkeys(("StopRequest", "WatchedLoop"), "stop_request"),
        **dict.fromkeys(("StoreWorker", "serve_store", "worker_processes"), "feed_workers"),
        **dict.fromkeys(("Feed", "FeedBatch", "FeedWorker", "Sample", "feed"), "feeding"),
        "Arrival": "feed_pace",
    }

    def __getattr__(name: str) -> Any:
        """What few loops use, loaded when asked for."""
        if name in _LATE:
            return getattr(import_module(f"swpipe.loops.{_LATE[name]}"), name)
        raise AttributeError(f"module 'swpipe.loops' has no attribute {name!r}")
