"""Attributes of the context go when their last user is done, under a plan that says what it keeps.

    host            forward i |        forward i+1 |
                              |(1)                 |(1) (2)
    caller's stream           `#### forward i ####-e(i)-#### backward i ### forward i+1 ##-e(i+1)
    memory of batch i  ...............................|   given back at (2): e(i) is reached then

Where they go is decided when the program is compiled (``swpipe.analysis.last_readers``). There,
the attribute is deleted (1). Where all device work is on one stream, or there is none, its memory
is free then. Else the device may not be done with it. So the memory waits, and at the same place of
the next iteration the host waits until the device has done the work of all tasks of the iteration
that were called before that place, and lets the memory go (2). It returns to the stream on which it
was made, which may reuse it at once: nothing depends on when an allocator looks, as with
``record_stream``.

Guarantees
    - A value goes when all its users have returned, in every interleaving; a user finds it.
    - Memory is given back when the device has done the work of all tasks of its iteration that
      come before the place where it went (2), users or not. It may have been made on any stream,
      also on one that the plan does not name.
    - What is also reachable otherwise, by another attribute, by an object of the user's or by
      autograd, for the backward, may be used after (1). It is held instead (``Device.hold``): its
      memory goes when whoever drops it last was done on all streams. Whether others refer to it is
      asked when it is no attribute any more: what nobody refers to then, nobody can reach again.
    - At each place the memory of one iteration waits, and of two while the host does; of a group of
      several workers, for each of them. So the host
      is ahead of the device by no more than one iteration, counted from such a place.
    - A run that ends holds what still waits.
    - What no task is known to use goes at the end of the iteration: a task may set it, and read it
      again, at any time before.
    - A retired context has what is kept, and nothing else.

Assumptions
    - Tasks use no other attributes than they say or were recorded to use. One that does fails with
      RuntimeError; or, where nothing orders it before or after the others, may find the value
      still there: its device work is then not waited for.
    - Who keeps memory of an attribute keeps a tensor that has it, not its ``untyped_storage()``
      alone: that cannot be told from the module's own.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from swpipe._engine.bind import Step
from swpipe._engine.iterations import InFlightIterations
from swpipe._engine.program import Instruction
from swpipe.core.context import RELEASED, TypedContext
from swpipe.core.messages import listed
from swpipe.core.releases import Release, Releases
from swpipe.device import Event


def with_releases(
    iterations: InFlightIterations, ins: Instruction, step: Step, worker: int = 0
) -> Step:
    """Let go what the plan lets go before and after a task's turn, of one of several workers."""
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
    let_go = _let_go(iterations, release, worker)

    def released(i: int) -> None:
        ctx = slots[i % depth].ctx  # a run that is given up forgets its slots meanwhile
        if after:
            step(i)
        values = take(ctx, release.names, releases)
        del ctx
        let_go(i, values)
        if not after:
            step(i)

    return released


def take(ctx: TypedContext, names: Iterable[str], releases: Releases) -> list[Any]:
    """Delete attributes, and return their values.

    One for which the class has a default, or a property, stays: who read it would get that.
    """
    there = vars(ctx)
    gone = getattr(ctx, RELEASED)
    values = []
    for name in names:
        if name in there and not hasattr(type(ctx), name):
            gone[name] = releases.why.get(name, releases.why_others)
            values.append(there.pop(name))  # and no del: nobody else is to notice
    return values


def let_go(ctx: TypedContext, task: str, releases: Releases) -> list[Any]:
    """What goes after a task in a serial run, in which every place is after a task."""
    names = (name for release in releases.at.get(task, ()) for name in release.names)
    return take(ctx, names, releases)


def begin(ctx: TypedContext) -> None:
    """A context that lets attributes go."""
    object.__setattr__(ctx, RELEASED, {})


def finish(ctx: TypedContext, releases: Releases) -> list[Any]:
    """Leave on a context what is kept; returns the rest."""
    return take(ctx, [name for name in vars(ctx) if name not in releases.kept], releases)


def warn_of_missing(ctx: TypedContext, releases: Releases) -> None:
    """Compare the first context of a run with what is to be kept.

    Warns:
        RuntimeWarning: Something is not there.
    """
    if missing := [name for name in releases.kept if not hasattr(ctx, name)]:
        had = sorted({*getattr(ctx, RELEASED), *vars(ctx)})
        warnings.warn(
            f"keep names {listed(sorted(missing))}, which iteration {ctx.iter_idx} does not have "
            f"in the end (it had: {listed(had)}): correct the name, unless a later one has it",
            RuntimeWarning,
            stacklevel=2,
        )


class _Waiting(NamedTuple):
    """Memory of an iteration, and the events after which it may go."""

    iteration: int
    memory: list[Any]
    events: list[Event]


class WaitingMemory:
    """The memory that waits at one place for the device.

    Args:
        iterations: Of the run.
        release: What goes at the place.
    """

    def __init__(self, iterations: InFlightIterations, release: Release) -> None:
        self._iterations = iterations
        self._device = iterations.engine.device
        self._events = [iterations.events[task] for task in release.behind]
        self._waiting: deque[_Waiting] = deque()

    def add(self, i: int, values: list[Any]) -> None:
        """Let the memory of one iteration wait, and give back that of the one before."""
        memory = self._device.take_over(values, self._iterations.all_streams)
        if memory:  # else it was on the host
            slot = i % self._iterations.ring
            self._waiting.append(_Waiting(i, memory, [events[slot] for events in self._events]))
        del memory
        while self._waiting and self._waiting[0].iteration < i:
            for event in self._waiting[0].events:
                self._iterations.await_device(event)  # (2)
            self._waiting.popleft()

    def hold(self) -> None:
        """The run ends: hold what waits instead, and wait no more."""
        for waiting in self._waiting:
            self._device.hold(waiting.memory, self._iterations.all_streams)
        self._waiting.clear()


def _at_once(iterations: InFlightIterations, i: int, values: list[Any]) -> None:
    """Give back memory that the work that comes next may use; of another stream's, when it may."""
    iterations.engine.device.hold(values, iterations.all_streams)
    values.clear()


def _let_go(
    iterations: InFlightIterations, release: Release, worker: int
) -> Callable[[int, list[Any]], None]:
    if not release.behind:
        return partial(_at_once, iterations)
    # One for both lists of instructions, with observers and without.
    place = id(release), worker
    waiting = iterations.waiting.get(place) or WaitingMemory(iterations, release)
    iterations.waiting[place] = waiting
    return waiting.add
