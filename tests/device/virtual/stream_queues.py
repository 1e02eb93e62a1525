"""Streams that run late: queues, a random scheduler, and what is known of their order.

    submitted by default   [a1]      [a2] wait e
    submitted by io             [b1]             [b2]    one stream, in the order of submission
    runs                   ──────────────>               as far as the scheduler chose to run it

An item in a stream's queue is an operation, the mark of an event, or a wait for a mark. Items run
in stream order, and an item that waits after the mark that it waits for; otherwise when the
scheduler chooses: some streams run early, some only when forced.

An item's clock is set when it is submitted. Before the item happens

- what happened before the submission on the submitting thread;
- the stream's items before it *whose submission did*: without an order between the threads, it is
  chance that b1 is before a2;
- what happens before the mark that it waits for.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import itemgetter

from swpipe.errors import InternalError
from tests.device.virtual.clocks import Clock, HostClocks, Stamp, merge


@dataclass(eq=False, slots=True)
class Item:
    """An item of a stream's queue.

    Attributes:
        submitted: The step of the thread that submitted it.
        stamp: Its own step: one actor is what one thread submits to one stream.
        clock: The events that happen before it, and itself.
        awaited: The mark that it waits for.
    """

    stream: VirtualStream
    submitted: Stamp
    stamp: Stamp
    clock: Clock
    awaited: Item | None = None
    run: Callable[[], None] | None = None
    done: bool = False

    @property
    def ready(self) -> bool:
        """Whether the item may run when it is the first of its queue."""
        return self.awaited is None or self.awaited.done


class VirtualStream:
    """An in-order queue of work.

    Attributes:
        name: Unique on its device.
        eagerness: The probability that the scheduler runs a ready item; 0 for only when forced.
        queue: The work that has not run yet.
        ends: Submitting thread to its submissions, as (its step, their clock).
    """

    def __init__(self, name: str, eagerness: float) -> None:
        self.name = name
        self.eagerness = eagerness
        self.queue: deque[Item] = deque()
        self.ends: dict[Hashable, list[tuple[int, Clock]]] = defaultdict(list)

    def __repr__(self) -> str:
        return f"stream {self.name!r}"

    def end(self) -> Clock:
        """Return the clock of all work submitted to the stream so far."""
        clock: Clock = {}
        for ends in self.ends.values():
            merge(clock, ends[-1][1])
        return clock


class Queues:
    """All streams of a device, and the scheduler. Not thread-safe: the device has a lock."""

    def __init__(self, clocks: HostClocks, seed: int) -> None:
        self.streams: list[VirtualStream] = []
        self._clocks = clocks
        self._random = random.Random(seed)

    def new_stream(self, name: str = "") -> VirtualStream:
        """Return a new stream of random eagerness."""
        eagerness = self._random.choice((0.0, 0.2, 0.6, 1.0))
        stream = VirtualStream(name or f"stream {len(self.streams)}", eagerness)
        self.streams.append(stream)
        return stream

    def submit(
        self,
        stream: VirtualStream,
        run: Callable[[], None] | None = None,
        awaited: Item | None = None,
    ) -> Item:
        """Submit an item to a stream, from the calling thread."""
        submitted = self._clocks.step()
        thread, step = submitted
        clock = self._clocks.now()
        for other, ends in stream.ends.items():
            if known := bisect_right(ends, clock.get(other, 0), key=itemgetter(0)):
                merge(clock, ends[known - 1][1])
        if awaited is not None:
            merge(clock, awaited.clock)
        stamp = Stamp((stream.name, thread), step)
        clock[stamp.actor] = step
        stream.ends[thread].append((step, clock))
        item = Item(stream, submitted, stamp, clock, awaited, run)
        stream.queue.append(item)
        return item

    def mark(self, stream: VirtualStream) -> Item:
        """Add a mark to the end of a stream's work, without a submitting thread."""
        nobody = Stamp("nobody", 0)
        item = Item(stream, nobody, nobody, stream.end())
        stream.queue.append(item)
        return item

    def stir(self) -> None:
        """Let the scheduler run some of what is ready."""
        streams = list(self.streams)
        self._random.shuffle(streams)
        for stream in streams:
            while (
                stream.queue and stream.queue[0].ready and self._random.random() < stream.eagerness
            ):
                self._run_next(stream)

    def ask(self, item: Item) -> bool:
        """Return whether an item is done; if so, it happens before the caller's next actions.

        After enough calls it is done.
        """
        self.stir()
        if self._random.random() < 0.5:
            self._run_to(item)
        if item.done:
            self._clocks.learn(item.clock)
        return item.done

    def force(self, item: Item) -> None:
        """Run an item and the items it needs; add its clock to the caller's."""
        self._run_to(item)
        self._clocks.learn(item.clock)

    def force_all(self) -> None:
        """Run all items, and add their clocks to the caller's."""
        for stream in self.streams:
            while stream.queue:
                self._run_next(stream)
            self._clocks.learn(stream.end())

    def _run_to(self, item: Item) -> None:
        while not item.done:
            if not item.stream.queue:
                raise InternalError("the virtual device has lost work")
            self._run_next(item.stream)

    def _run_next(self, stream: VirtualStream) -> None:
        head = stream.queue[0]
        if head.awaited is not None:
            self._run_to(head.awaited)
        stream.queue.popleft()
        if head.run is not None:
            head.run()
            head.run = None
        head.done = True
