"""Release of context attributes after their last use, under a plan that says what it keeps.

    host            forward i |        forward i+1 |
                              |(1)                 |(1) (2)
    caller's stream           `#### forward i ####-e(i)-#### backward i ### forward i+1 ##-e(i+1)
    memory of batch i  ...............................|   given back at (2): e(i) is reached then

``swpipe.analysis.last_readers`` decides at compile time after which task an attribute is released:
the place of the release. At that place the attribute is deleted (1). If all device work is on one
stream, or there is none, the memory is free then. Otherwise the device may still use it. So the
memory waits: at the same place of the next iteration, the host waits until the device has finished
all tasks of the iteration that were called before that place, and then frees the memory (2). The
memory returns to the stream on which it was made, which may reuse it at once. With
``record_stream``, by contrast, the time of the reuse depends on when the allocator polls.

Guarantees
    - A value is released when all its users have returned, in every interleaving; every user finds
      the value.
    - Memory is given back when the device has finished all tasks of its iteration that come before
      the place of the release (2), users or not. The memory may have been made on any stream, also
      on one that the plan does not name.
    - A value that another attribute, an object of the user or the autograd graph also refers to may
      be used after (1). It is held instead (``Device.hold``): its memory is freed when the last
      reference is dropped and all streams have finished the work of that time. References are
      counted after the attribute was deleted: a value without references then cannot be reached
      again.
    - At each place the memory of one iteration waits, and of two while the host waits; for a group
      of several workers, this holds for each worker. So the host is ahead of the device by at most
      one iteration, counted from such a place.
    - A run that ends holds the memory that still waits.
    - An attribute that no task is known to use is released at the end of the iteration: until
      then, a task may set it and read it again.
    - A retired context has the attributes that are kept, and no others.

Assumptions
    - Tasks use only the attributes that they declare or were recorded to use. A task that uses
      another one fails with RuntimeError; or, if nothing orders it against the other users, it may
      still find the value: the release does not wait for its device work.
    - An object that keeps the memory of an attribute keeps a tensor of it, not its
      ``untyped_storage()`` alone: such a reference cannot be told from this module's own.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from swpipe._engine.bind import Step
from swpipe._engine.iterations import InFlightIterations
from swpipe.core.context import RELEASED, TypedContext
from swpipe.core.messages import listed
from swpipe.core.releases import Release, Releases
from swpipe.device import Event
from swpipe.program import Instruction


def with_releases(
    iterations: InFlightIterations, ins: Instruction, step: Step, worker: int = 0
) -> Step:
    """Return a step that makes the plan's releases before and after a task's turn."""
    releases = iterations.engine.releases
    if releases is not None:
        for release in releases.at.get(ins.task, ()):
            step = _with_release(iterations, releases, release, step, worker)
    return step


def _with_release(
    iterations: InFlightIterations, releases: Releases, release: Release, step: Step, worker: int
) -> Step:
    slots = iterations.slots
    depth = iterations.depth
    after = release.after
    # Both lists of instructions, with observers and without, share one queue of memory.
    place = id(release), worker
    waiting = iterations.waiting.setdefault(place, WaitingMemory(iterations, release))

    def released(i: int) -> None:
        # Look the context up before the step: a run that is abandoned clears its slots meanwhile.
        ctx = slots[i % depth].ctx
        if after:
            step(i)
        values = take(ctx, release.names, releases)
        del ctx
        waiting.add(i, values)
        if not after:
            step(i)

    return released


def take(ctx: TypedContext, names: Iterable[str], releases: Releases) -> list[Any]:
    """Delete attributes, and return their values.

    An attribute stays if its class has a default or a property of that name: a later reader would
    get
    that value without an error.
    """
    there = vars(ctx)
    gone = getattr(ctx, RELEASED)
    values = []
    for name in names:
        if name in there and not hasattr(type(ctx), name):
            gone[name] = releases.why.get(name, releases.why_others)
            # ``pop`` on the dictionary, because ``del`` would call the ``__delattr__`` of the
            # class.
            values.append(there.pop(name))
    return values


def let_go(ctx: TypedContext, task: str, releases: Releases) -> list[Any]:
    """Release the attributes that a serial run drops after a task, and return their values."""
    names = (name for release in releases.at.get(task, ()) for name in release.names)
    return take(ctx, names, releases)


def begin(ctx: TypedContext) -> None:
    """Prepare a context for releases."""
    object.__setattr__(ctx, RELEASED, {})


def finish(ctx: TypedContext, releases: Releases) -> list[Any]:
    """Delete all attributes of a context that are not kept, and return their values."""
    return take(ctx, [name for name in vars(ctx) if name not in releases.kept], releases)


def warn_of_missing(ctx: TypedContext, releases: Releases) -> None:
    """Compare the first context of a run with the attributes that are to be kept.

    Warns:
        RuntimeWarning: An attribute that is to be kept is missing.
    """
    if missing := [name for name in releases.kept if not hasattr(ctx, name)]:
        had = sorted({*getattr(ctx, RELEASED), *vars(ctx)})
        warnings.warn(
            f"keep names {listed(sorted(missing))}, which the context of iteration {ctx.iter_idx} "
            f"did not have (it had: {listed(had)}): correct the name, or ignore this warning if a "
            "later iteration has it",
            RuntimeWarning,
            stacklevel=2,
        )


class _Waiting(NamedTuple):
    """Memory of an iteration, and the events after which it may be freed."""

    iteration: int
    memory: list[Any]
    events: list[Event]


class WaitingMemory:
    """The memory that waits for the device at one place.

    Args:
        iterations: The iterations of the run.
        release: The release at the place.
    """

    def __init__(self, iterations: InFlightIterations, release: Release) -> None:
        self._iterations = iterations
        self._device = iterations.engine.device
        self._events = [iterations.events[task] for task in release.behind]
        self._waiting: deque[_Waiting] = deque()

    def add(self, i: int, values: list[Any]) -> None:
        """Let the memory of one iteration wait, and free the memory of the one before."""
        # Without events to wait for, all device work is on one stream, which reuses memory in its
        # order. Memory of another stream is held until that stream may reuse it.
        if not self._events:
            self._device.hold(values, self._iterations.all_streams)
            values.clear()
            return
        memory = self._device.take_over(values, self._iterations.all_streams)
        # Values on the host have no device memory.
        if memory:
            slot = i % self._iterations.ring
            self._waiting.append(_Waiting(i, memory, [events[slot] for events in self._events]))
        # The list in ``_waiting`` is the only reference now, so ``popleft`` frees the memory.
        del memory
        while self._waiting and self._waiting[0].iteration < i:
            for event in self._waiting[0].events:
                self._iterations.await_device(event)  # (2)
            self._waiting.popleft()

    def hold(self) -> None:
        """Hold the waiting memory on all streams instead, at the end of a run."""
        for waiting in self._waiting:
            self._device.hold(waiting.memory, self._iterations.all_streams)
        self._waiting.clear()
