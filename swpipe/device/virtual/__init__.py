"""A device for tests: streams that run late and in any order the events allow."""

from swpipe.device.virtual.stream_queues import VirtualStream
from swpipe.device.virtual.virtual_device import (
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
