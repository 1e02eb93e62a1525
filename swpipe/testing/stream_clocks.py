"""Happens-before between streams and the host, by vector clocks.

Each stream has a clock, which holds for each stream the number of the last launch that is known
to be done when the clock's stream starts its next work. The host is one more stream: all its
threads count as one, in the order in which they are seen.

    launch          the stream joins the host's clock, and takes the next number
    event           a copy of its stream's clock; a stream that waits for it joins the copy
    synchronize     the host joins the clock of the event, the stream, or all streams

Two accesses of overlapping bytes, at least one of which writes, race if the later stream's clock
does not include the earlier launch. The answer does not depend on how the streams were timed. A
pair of host threads is never reported.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

HOST = -1
"""The host among the streams."""

Clock: TypeAlias = dict[int, int]


class StreamClocks:
    """The clocks of all streams, by the number that torch's trace callbacks use."""

    def __init__(self) -> None:
        self._clocks: defaultdict[int, Clock] = defaultdict(dict)
        self._events: dict[int, Clock] = {}
        self._launches = 0

    def launch(self, stream: int) -> int:
        """Return the number of the next launch, on ``stream``."""
        self._launches += 1
        clock = self._clocks[stream]
        # What the host has waited for is done before it launches anything.
        _join(clock, self._clocks[HOST])
        clock[stream] = self._launches
        return self._launches

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream."""
        # A copy: later launches on the stream are not part of the event.
        self._events[event] = dict(self._clocks[stream])

    def forget(self, event: int) -> None:
        """Drop a deleted event, whose number may be used again."""
        self._events.pop(event, None)

    def wait(self, event: int, stream: int = HOST) -> None:
        """Make a stream, or the host, wait for an event; one that was not recorded is done."""
        _join(self._clocks[stream], self._events.get(event, {}))

    def synchronize(self, *streams: int) -> None:
        """Make the host wait for some streams; for all if none are given."""
        for stream in streams or [*self._clocks]:
            _join(self._clocks[HOST], self._clocks[stream])

    def includes(self, stream: int, other: int, launch: int) -> bool:
        """Return whether work on ``stream`` comes after a launch on ``other``."""
        return launch <= self._clocks[stream].get(other, 0)


def _join(clock: Clock, other: Clock) -> None:
    """Add to a clock all launches that another clock includes."""
    for stream, launch in other.items():
        clock[stream] = max(launch, clock.get(stream, 0))


class Bytes(NamedTuple):
    """Part of the memory at an address.

    Attributes:
        base: The address of the storage.
        begin: The first byte, counted from there.
        end: The byte after the last one.
    """

    base: int
    begin: int
    end: int


@dataclass
class Use:
    """One access in the history of some memory.

    Attributes:
        bytes: The bytes that it reads or writes.
        writes: Whether it writes them.
        stream: The number of its stream; ``HOST`` for the host.
        launch: The number of its launch.
        access: The description for messages.
        freed: The memory was freed, and given to another tensor, after this use.
    """

    bytes: Bytes
    writes: bool
    stream: int
    launch: int
    access: Any
    freed: bool = False


class MemoryHistory:
    """The uses of memory that later accesses may race with.

    Memory that the allocator reuses keeps its history: the allocator orders its use only with the
    stream on which it was allocated, and with those that ``record_stream`` named.
    """

    def __init__(self, clocks: StreamClocks) -> None:
        self._clocks = clocks
        self._uses: defaultdict[int, list[Use]] = defaultdict(list)
        self._recorded: defaultdict[int, set[int]] = defaultdict(set)

    def record_stream(self, base: int, stream: int) -> None:
        """Note that the memory stays until the stream's work is done."""
        self._recorded[base].add(stream)

    def allocate(self, base: int, *, on_host: bool) -> None:
        """Begin the life of a new tensor at an address."""
        recorded = self._recorded.pop(base, set())
        # The allocator of pinned memory waits for all copies before it gives memory again, so that
        # the history of host memory ends here.
        uses = [use for use in self._uses.pop(base, []) if not on_host]
        for use in uses:
            if use.stream not in recorded:
                use.freed = True
                self._uses[base].append(use)

    def add(self, use: Use) -> list[Use]:
        """Add a use, and return the earlier uses with which it races."""
        remaining = []
        races = []
        base, begin, end = use.bytes
        for other in self._uses[base]:
            ordered = self._clocks.includes(use.stream, other.stream, other.launch)
            overlaps = other.bytes.begin < end and begin < other.bytes.end
            if overlaps and not ordered and (use.writes or other.writes):
                races.append(other)
            covered = begin <= other.bytes.begin and other.bytes.end <= end
            # A later use that races with the other one races with this one as well, if this one
            # covers the other's bytes, and writes them or finds them only read. The history then
            # drops the other use, and stays short.
            replaced = use.writes or not other.writes
            if not (covered and ordered and replaced):
                remaining.append(other)
        self._uses[base] = [*remaining, use]
        return races
