"""Streams that run late: queues, an adversary who runs them, and what is known of their order.

    submitted by default   [a1]      [a2] wait e
    submitted by io             [b1]             [b2]    one stream, in the order of submission
    runs                   ──────────────>               up to where the adversary has let it

Whatever is submitted is an item in a stream's queue: an operation, the mark of an event, or a wait
for a mark. Items run in stream order, an item that waits after the mark that it waits for, and
otherwise when the adversary likes: some streams are hasty, some run only when forced.

An item's clock is set when it is submitted. It knows

- what the submitting thread knows;
- the stream's items before it *that this thread knows of*: that b1 stands before a2 is luck, unless
  io told default of b1;
- what is before the mark that it waits for.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import itemgetter

from swpipe.core.errors import InternalError
from swpipe.device.virtual.clocks import Clock, HostClocks, Stamp, merge


@dataclass(eq=False, slots=True)
class Item:
    """One thing in a stream's queue.

    Attributes:
        stream: The stream.
        submitted: The step of the thread that submitted it.
        stamp: Its own step: one actor is what one thread submits to one stream.
        clock: What is known to come before it, and itself.
        awaited: The mark that it waits for.
        run: What it does.
        done: Whether the stream has come past it.
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
        """Whether it may run once it is the first of its queue."""
        return self.awaited is None or self.awaited.done


class VirtualStream:
    """An in-order queue of work.

    Attributes:
        name: Unique on its device.
        haste: How likely a ready item is run at each turn of the adversary; 0 is only when forced.
        queue: What has not run yet.
        ends: Submitting thread to its submissions, as (its step, their clock).
    """

    def __init__(self, name: str, haste: float) -> None:
        self.name = name
        self.haste = haste
        self.queue: deque[Item] = deque()
        self.ends: dict[Hashable, list[tuple[int, Clock]]] = defaultdict(list)

    def __repr__(self) -> str:
        return f"stream {self.name!r}"

    def end(self) -> Clock:
        """What comes before anything submitted from now on, known to the submitter or not."""
        clock: Clock = {}
        for ends in self.ends.values():
            merge(clock, ends[-1][1])
        return clock


class Queues:
    """All streams of a device, and the adversary. Not safe for threads: the device has a lock.

    Args:
        clocks: Clocks of the host's threads.
        seed: What the adversary's choices derive from.
    """

    def __init__(self, clocks: HostClocks, seed: int) -> None:
        self.streams: list[VirtualStream] = []
        self._clocks = clocks
        self._random = random.Random(seed)

    def new_stream(self, name: str = "") -> VirtualStream:
        """A stream of its own, of a haste that the adversary draws."""
        haste = self._random.choice((0.0, 0.2, 0.6, 1.0))
        stream = VirtualStream(name or f"stream {len(self.streams)}", haste)
        self.streams.append(stream)
        return stream

    def submit(
        self,
        stream: VirtualStream,
        run: Callable[[], None] | None = None,
        awaited: Item | None = None,
    ) -> Item:
        """Put an item on a stream, on behalf of the calling thread."""
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
        """Mark the end of all that the stream has been given, on behalf of nobody."""
        nobody = Stamp("nobody", 0)
        item = Item(stream, nobody, nobody, stream.end())
        stream.queue.append(item)
        return item

    def stir(self) -> None:
        """The adversary's turn: run some of what is ready."""
        streams = list(self.streams)
        self._random.shuffle(streams)
        for stream in streams:
            while stream.queue and stream.queue[0].ready and self._random.random() < stream.haste:
                self._run_next(stream)

    def ask(self, item: Item) -> bool:
        """Whether an item is done; asked often enough, it is. The caller then knows it."""
        self.stir()
        if self._random.random() < 0.5:
            self._run_to(item)
        if item.done:
            self._clocks.learn(item.clock)
        return item.done

    def force(self, item: Item) -> None:
        """Run an item and what must come before it, nothing else. The caller then knows it."""
        self._run_to(item)
        self._clocks.learn(item.clock)

    def force_all(self) -> None:
        """Run all that there is; the caller then knows it."""
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
