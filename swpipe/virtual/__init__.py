"""A device for tests: streams that run late and in any order the events allow."""

from swpipe.virtual.device import (
    Buffer,
    EventReused,
    Race,
    RanAhead,
    UseAfterFree,
    Violation,
    VirtualDevice,
    VirtualEvent,
    WaitBeforeRecord,
    Work,
)
from swpipe.virtual.queues import VirtualStream

__all__ = [
    "Buffer",
    "EventReused",
    "Race",
    "RanAhead",
    "UseAfterFree",
    "Violation",
    "VirtualDevice",
    "VirtualEvent",
    "VirtualStream",
    "WaitBeforeRecord",
    "Work",
]
