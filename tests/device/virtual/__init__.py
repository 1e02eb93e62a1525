"""A device for tests: streams that run late and in any order the events allow."""

from tests.device.virtual.stream_queues import VirtualStream
from tests.device.virtual.virtual_device import (
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
