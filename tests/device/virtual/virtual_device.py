"""A virtual device that checks order: for tests, on a machine without an accelerator.

    host     default ── launch ──> caller's │ op   record e   op │    streams: work runs in order,
             io      ── launch ──> copy     │ wait e   op   op   │    but late
                                                       │
    memory   blocks of "copy":  [0] <─── Buffer ───────┘     when its last reference is dropped,
                                [1] (free)                   the block goes back to "copy" at once

``launch`` submits a function to the current stream; a random scheduler decides when it runs
(``tests.device.virtual.stream_queues``). Memory behaves as under a caching allocator: a block
belongs to the stream that was current when it was made, and is reused there as soon as it is freed;
one that was recorded on other streams, only when these have done the work submitted before that.

Two kinds of checks:

(1) *Order*, when work is submitted, by vector clocks (``tests.device.virtual.clocks``): of two
    uses of a block, one of them a write, one must happen before the other; or else it is a
    violation, whether or not it shows this time. Events too are used by threads: the record must
    happen before a wait, and all waits before the next record.
(2) *Values*, when work runs: whether its blocks hold the values that they should.

Guarantees
    - Every violation of (1) in the submitted work is found, whatever the scheduler did.
    - Work runs in stream order, and never before an event that its stream waits for.

Assumptions
    - All threads and counters are those of ``VirtualDevice.host``, which a pipeline takes from it.
    - Functions given to ``launch`` take values and return the new one; they refer to no buffer.
    - Runs are short: histories are not pruned.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

from swpipe._engine.waiting import Host
from swpipe._values.walk import nodes_in, record_stream
from swpipe.core.plan import StreamSpec
from tests.device.virtual.clocks import Clock, ClockedHost, HostClocks, Stamp, merge
from tests.device.virtual.stream_queues import Item, Queues, VirtualStream
from tests.support.stream_device import StreamDevice


class Violation(Exception):
    """Work broke a rule of the device; the message names it."""


class Race(Violation):
    """Two uses of a value, one of them a write, are not ordered."""


class WaitBeforeRecord(Violation):
    """An event's record does not happen before a wait for it."""


class EventReused(Violation):
    """An event was recorded again while others may still wait for its last record."""


class UseAfterFree(Violation):
    """Memory was reused while its former value may still have been in use."""


class RanAhead(Violation):
    """The host ran further ahead of the device than it may."""


class Work(NamedTuple):
    """The task and iteration of some device work, for messages and ``expect_done``."""

    task: str
    iteration: int

    def __str__(self) -> str:
        return f"{self.task} of iteration {self.iteration}"


UNNAMED = Work("unnamed work", -1)


class _Use(NamedTuple):
    """One use of a block."""

    work: Work
    how: str
    buffer: int
    item: Item


class _Block:
    """Memory; a plain class, so that ``swpipe._values.walk`` does not open it."""

    def __init__(self, stream: VirtualStream) -> None:
        self.stream = stream  # its owner
        self.content = (0, 0)  # buffer and version of the value in it
        self.value: Any = None
        self.written: _Use | None = None  # the last write submitted
        self.read: dict[Hashable, _Use] = {}  # the reads since, the last of each actor
        self.recorded: set[VirtualStream] = set()  # other streams that use it
        self.until: list[Item] = []  # marks that must be reached before it is reused
        self.past: Clock = {}  # what happens before its allocation: what is known to be done when
        # it was freed, the owner's work, and the marks


class Buffer:
    """A value on the device, as tasks keep it in the context; dropping it frees its memory."""

    def __init__(self, device: VirtualDevice, block: _Block, number: int) -> None:
        self.number = number
        self.version = 0  # writes submitted so far
        self._device = device
        self._block = block

    def record_stream(self, stream: VirtualStream) -> None:
        """Keep the memory until ``stream`` has done the work submitted before it was freed."""
        if stream is not self._block.stream:
            self._block.recorded.add(stream)

    def __del__(self) -> None:
        self._device._free(self._block)

    def __repr__(self) -> str:
        return f"buffer {self.number} of {self._block.stream!r}"


class VirtualEvent:
    """An event that knows which thread recorded it, and which have waited for it since."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._mark: Item | None = None
        self._recorded: Stamp | None = None
        self._waited: dict[Hashable, Stamp] = {}

    def record(self, stream: VirtualStream) -> None:
        device = self._device
        with device.lock:
            used = [*self._waited.values(), *([self._recorded] if self._recorded else [])]
            if not all(map(device.clocks.knows, used)):
                device.report(EventReused(f"an event is recorded again on {stream!r} while in use"))
            self._waited.clear()
            self._mark = device.queues.submit(stream)
            self._recorded = self._mark.submitted
            device.queues.stir()

    def wait(self, stream: VirtualStream) -> None:
        with self._device.lock:
            if self._known_mark(f"{stream!r} is made to wait for an event") is not None:
                self._device.queues.submit(stream, awaited=self._mark)
                self._device.queues.stir()

    def query(self) -> bool:
        with self._device.lock:
            mark = self._known_mark("the host asks for an event")
            return mark is None or self._device.queues.ask(mark)

    def _known_mark(self, what: str) -> Item | None:
        """Return the last record's mark; that record must happen before this call."""
        clocks = self._device.clocks
        if self._recorded is None:
            self._device.report(WaitBeforeRecord(f"{what} that was never recorded"))
        elif not clocks.knows(self._recorded):
            self._device.report(WaitBeforeRecord(f"{what}, and nothing says that it is recorded"))
        stamp = clocks.step()
        self._waited[stamp.actor] = stamp
        return self._mark


class VirtualDevice(StreamDevice[VirtualStream]):
    """Streams, events and memory as drawn above.

    Args:
        seed: Seed of the scheduler's choices.
        host: The source of threads and counters; the operating system if None.

    Attributes:
        host: The same with clocks: to be given to the pipeline.
        violations: The violations so far.
        reused: The number of buffers that reused another's memory.
    """

    type = "virtual"
    name = "virtual:0"

    def __init__(self, seed: int = 0, host: Host | None = None) -> None:
        self.lock = threading.RLock()  # reentrant: a buffer may be freed while its thread holds it
        self.clocks = HostClocks()
        self.host = ClockedHost(self.clocks, host)
        self.queues = Queues(self.clocks, seed)
        self.violations: list[Violation] = []
        self.reused = 0
        super().__init__(self.queues.new_stream("caller's"))
        self._buffers = 0
        self._free_blocks: dict[VirtualStream, list[_Block]] = defaultdict(list)  # last freed last
        self._unfinished: dict[int, list[Stamp]] = defaultdict(list)  # by iteration

    def new_stream(self, spec: StreamSpec) -> VirtualStream:
        with self.lock:
            return self.queues.new_stream()

    def new_event(self, *, timing: bool = False) -> VirtualEvent:
        return VirtualEvent(self)

    def holds_work(self, value: Any) -> bool:
        return any(isinstance(node.value, Buffer) for node in nodes_in(value))

    def hold(self, values: Iterable[Any], streams: Iterable[VirtualStream]) -> None:
        with self.lock:
            record_stream(tuple(values), *streams)

    def take_over(self, values: list[Any], streams: Iterable[VirtualStream]) -> list[Any]:
        with self.lock:
            found = [node.value for node in nodes_in(values) if isinstance(node.value, Buffer)]
            values.clear()
            alone = sys.getrefcount(object()) + 2  # in the list, and in the loop's variable
            taken = []
            for buffer in found:
                if sys.getrefcount(buffer) > alone:
                    self.hold([buffer], streams)
                else:
                    taken.append(buffer)
            return taken

    def synchronize(self) -> None:
        with self.lock:
            self.queues.force_all()

    def launch(
        self,
        fn: Callable[..., Any],
        *reads: Buffer,
        into: Buffer | None = None,
        work: Work = UNNAMED,
    ) -> Buffer:
        """Submit ``fn``, a function of the values of ``reads``, to the current stream.

        Args:
            fn: Takes the values, returns one.
            reads: The values that are read; ``into`` only if it is among them.
            into: The buffer to write; None for a new one, made on the current stream.
            work: The work that this belongs to.

        Returns:
            The buffer that is written.
        """
        with self.lock:
            item = self.queues.submit(self.current_stream())
            out = self._allocate(item.stream) if into is None else into
            sources = [self._read(buffer, item, work) for buffer in reads]
            target = self._write(out, item, work)
            item.run = lambda: self._execute(fn, sources, target, work)
            if work.iteration >= 0:
                self._unfinished[work.iteration].append(item.stamp)
            self.queues.stir()
            return out

    def read(self, buffer: Buffer, work: Work = UNNAMED) -> Any:
        """Return the value of ``buffer``, read on the current stream; the host waits for it."""
        with self.lock:
            found: list[Any] = []
            item = self.queues.submit(self.current_stream())
            source = self._read(buffer, item, work)
            item.run = lambda: found.append(self._look(source, work))
            self.queues.force(item)
            return found[0]

    def expect_done(self, iteration: int) -> None:
        """Check that all work up to ``iteration`` happens before this call."""
        with self.lock:
            for i in [i for i in self._unfinished if i <= iteration]:
                if not all(map(self.clocks.knows, self._unfinished.pop(i))):
                    self.report(RanAhead(f"work of iteration {i} may still be under way"))

    def report(self, violation: Violation) -> None:
        """Store a violation, which ``check`` raises."""
        self.violations.append(violation)

    def check(self) -> None:
        """Raise all violations so far, as an ExceptionGroup."""
        if self.violations:
            raise ExceptionGroup("rules of the device were broken", self.violations)

    # ------------------------------------------------------------- (1): order

    def _read(self, buffer: Buffer, item: Item, work: Work) -> tuple[_Block, tuple[int, int]]:
        """Check and store a read; return the block, and the value that it should have."""
        block = buffer._block
        use = _Use(work, "reads", buffer.number, item)
        self._check_order(use, block, block.written)
        block.read[item.stamp.actor] = use
        return block, (buffer.number, buffer.version)

    def _write(self, buffer: Buffer, item: Item, work: Work) -> tuple[_Block, tuple[int, int]]:
        """Check and store a write; return the block, and the value that it will have."""
        block = buffer._block
        use = _Use(work, "writes", buffer.number, item)
        for before in (block.written, *block.read.values()):
            self._check_order(use, block, before)
        block.written = use
        block.read.clear()
        buffer.version += 1
        return block, (buffer.number, buffer.version)

    def _check_order(self, use: _Use, block: _Block, before: _Use | None) -> None:
        if before is None:
            return
        ordered = before.item.stamp.before(use.item.clock)
        found = (
            f"{use.work} {use.how} buffer {use.buffer} on {use.item.stream!r}, and nothing says "
            f"that this comes after {before.work}, which {before.how} "
        )
        if before.buffer == use.buffer:
            # Both the calls on the host and the work on the device.
            if not (ordered and self.clocks.knows(before.item.submitted)):
                self.report(Race(f"{found} it on {before.item.stream!r}"))
        elif not ordered:
            # The block was another buffer's. On its owner, the allocator orders the two.
            on_owner = use.item.stream is block.stream
            if not (on_owner and before.item.stamp.before(block.past)):
                where = f"buffer {before.buffer} in the same memory on {before.item.stream!r}"
                self.report(UseAfterFree(found + where))

    # ------------------------------------------------------------------------ memory

    def _allocate(self, stream: VirtualStream) -> Buffer:
        self._buffers += 1
        free = self._free_blocks[stream]
        for block in reversed(free):
            if all(mark.done for mark in block.until):
                free.remove(block)
                self.reused += 1
                break
        else:
            block = _Block(stream)
        merge(block.past, stream.end())
        for mark in block.until:
            merge(block.past, mark.clock)
        block.until = []
        return Buffer(self, block, self._buffers)

    def _free(self, block: _Block) -> None:
        with self.lock:
            block.until = [self.queues.mark(stream) for stream in block.recorded]
            block.recorded = set()
            # The allocator's lock: whatever the thread that frees knows to be done on the device
            # is done when the block is allocated again, by whichever thread.
            block.past = self.clocks.now()
            self._free_blocks[block.stream].append(block)

    # ------------------------------------------------------------- (2): values

    def _execute(
        self,
        fn: Callable[..., Any],
        sources: list[tuple[_Block, tuple[int, int]]],
        target: tuple[_Block, tuple[int, int]],
        work: Work,
    ) -> None:
        value = fn(*(self._look(source, work) for source in sources))
        block, (buffer, version) = target
        if version > 1:
            self._look((block, (buffer, version - 1)), work)
        block.content, block.value = (buffer, version), value

    def _look(self, source: tuple[_Block, tuple[int, int]], work: Work) -> Any:
        """Return the value in a block, and report a violation if it is not the right one."""
        block, meant = source
        if block.content != meant:
            kind = UseAfterFree if block.content[0] > meant[0] else Race
            found, wanted = ("buffer {}, version {}".format(*c) for c in (block.content, meant))
            self.report(kind(f"{work} finds {found} where {wanted} should be"))
        return block.value
