"""Loops: work ahead of a plain loop, resume, ranks that end together, and a stop from outside."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Loaders of ranks that end together are in a private room, since the engine uses them, too.
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

# A type checker sees these names. At run time `__getattr__` imports them at their first use: a loop
# would otherwise load the modules of feeds, stops and results behind it with its first batch.
if TYPE_CHECKING:
    from swpipe.loops.feed_pace import Arrival
    from swpipe.loops.feed_workers import StoreWorker, serve_store, worker_processes
    from swpipe.loops.feeding import Feed, FeedBatch, FeedWorker, Sample, feed
    from swpipe.loops.stateful_loader import StatefulLoader
    from swpipe.loops.stop_request import StopRequest, WatchedLoop
    from swpipe.loops.through_loop import OnCaller, ThroughLoop, on_caller, through

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
    "OnCaller",
    "OutOfStepError",
    "Overlap",
    "OverlappedLoop",
    "RankDataError",
    "Resumable",
    "ResumableLoop",
    "Sample",
    "StatefulLoader",
    "StopRequest",
    "StoreWorker",
    "ThroughLoop",
    "UnevenDataError",
    "WatchedLoop",
    "ahead",
    "feed",
    "on_caller",
    "overlap",
    "pad_with",
    "pad_with_last",
    "serve_store",
    "through",
    "worker_processes",
]

# A name of this table stands in `__all__` and in the imports above, too.
_LATE = {
    "Arrival": "feed_pace",
    "Feed": "feeding",
    "FeedBatch": "feeding",
    "FeedWorker": "feeding",
    "OnCaller": "through_loop",
    "Sample": "feeding",
    "StatefulLoader": "stateful_loader",
    "StopRequest": "stop_request",
    "StoreWorker": "feed_workers",
    "ThroughLoop": "through_loop",
    "WatchedLoop": "stop_request",
    "feed": "feeding",
    "on_caller": "through_loop",
    "serve_store": "feed_workers",
    "through": "through_loop",
    "worker_processes": "feed_workers",
}
"""What few loops use, and the module that has it."""

# A type checker that saw this function would take every name of the module for Any.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return what few loops use, loaded when it is asked for."""
        if name in _LATE:
            return getattr(import_module(f"swpipe.loops.{_LATE[name]}"), name)
        raise AttributeError(f"module 'swpipe.loops' has no attribute {name!r}")
