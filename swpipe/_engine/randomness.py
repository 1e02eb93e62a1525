"""Random numbers that depend neither on the plan nor on other pipelines.

All threads of a process share torch's default generators, so what two tasks draw at the same time
depends on timing. A task with ``random=True`` therefore has exclusive access to the generators
while it runs. They are seeded from (pipeline's seed, task, iteration), and restored afterwards, so
that draws outside the pipeline (a data loader's shuffling) do not depend on the plan either.

Access is exclusive in the whole process: first come, first served. Within one run, access is given
in the order of the requests.

    pipeline A, lane io         requests == task ==|
                default lane              requests ..== pulls a batch ==|
    pipeline B, default lane           requests ......................== task ==|

A task, or the user's iterator, may itself drive a pipeline. For the time of that call it lends its
access: the inner pipeline's tasks may need it, on whatever thread they run.

    outer task   == draws ==|progress()                          |== draws on ==|
    inner pull              ...== draws from the outer's state ==|
    inner tasks                  == seeded ==|   == seeded ==|
    the generators   outer's    the process's                      outer's

Guarantees
    - One block at a time in the process has access. While no block has access, the generators have
      the process's own states.
    - The draws of a task do not depend on what runs while it lends its access: its own states are
      restored afterwards. A batch that is pulled meanwhile on the same thread draws from these
      states too, as if the iterator were called directly.
    - A run that ends gives back its access. A task that is still running then neither delays other
      runs nor changes the generators when it returns: they were restored on its behalf.
    - A thread that waits for access wakes when its run is cancelled. ``cancel`` takes no lock: a
      signal handler may call it, whatever it interrupted.
    - States are saved before the generators are seeded, and access is recorded by the operation
      that takes it. So an exception may arrive at any place (Ctrl-C): the access of an interrupted
      block is given back by the run's ``end``, or else by a waiting thread, which checks every
      ``WAKE_S`` whether the block that has access is still being executed.

Assumptions
    - Every task that uses the default generators has ``random=True``. While iterations are in
      flight, no other code uses them except the user's iterator: a batch is pulled with exclusive
      access too. (With another pipeline in another thread, the draws of such an iterator depend on
      timing, as they do for any two threads.)
    - A task or an iterator that has access does not wait for another thread that needs it.
    - A task that outlives its run draws no more random numbers.
    - Each operation of a dictionary is atomic, with and without the interpreter lock.
"""

from __future__ import annotations

import hashlib
import operator
import os
import sys
import threading
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from types import FrameType

import torch

from swpipe._engine.exclusive import is_executed
from swpipe._engine.waiting import WAKE_S, Cancelled, ProgressCounter
from swpipe.core.messages import shown
from swpipe.device import Device, GeneratorStates


class TaskSeeds:
    """The seeds of tasks with ``random=True``, all derived from one seed.

    Raises:
        TypeError: ``seed`` is not an integer.
    """

    def __init__(self, seed: int | None, device: Device) -> None:
        try:
            self.seed = torch.initial_seed() if seed is None else int(operator.index(seed))
        except TypeError:
            raise TypeError(f"seed is {shown(seed)}: give an integer, or None") from None
        self.device = device

    def begin(self, task: str, iteration: int) -> None:
        """Seed the default generators for this task and iteration."""
        key = hashlib.sha256(f"{self.seed}/{task}/{iteration}".encode()).digest()
        self.device.seed_generators(int.from_bytes(key[:7], "little"))

    def seeded(self, task: str, iteration: int) -> AbstractContextManager[None]:
        """Return a block with exclusive access and seeded generators, outside any run."""
        return GeneratorAccess(self, ProgressCounter()).seeded(task, iteration)


class GeneratorAccess:
    """One run's access to the default generators.

    ``counter`` counts the accesses that have ended. A request waits until the count reaches its
    number, which gives the requests their order.
    """

    def __init__(self, seeds: TaskSeeds, counter: ProgressCounter) -> None:
        self.seeds = seeds
        self.counter = counter
        # Guards the saved states of the generators. Reentrant, because a signal handler may
        # interrupt the thread that holds it.
        self.lock = threading.RLock()
        self.cancelled = False
        # The last access whose turn it was within the run.
        self.granted: BlockAccess | None = None
        self._requests = 0

    def exclusive(self) -> AbstractContextManager[None]:
        """Return a block within which no other thread uses the generators."""
        return BlockAccess(self)

    def seeded(self, task: str, iteration: int) -> AbstractContextManager[None]:
        """Return an exclusive block whose generators are seeded for this task and iteration."""
        return BlockAccess(self, (task, iteration))

    def next_request(self) -> int:
        """Return the number of a new request, from 0."""
        with self.lock:
            self._requests += 1
            return self._requests - 1

    def cancel(self) -> None:
        """Wake the threads that wait for access."""
        self.cancelled = True
        self.counter.cancel()
        if self.granted is not None:
            self.granted.wake()

    def end(self) -> None:
        """Give no further access, and restore the generators for a task that is still running."""
        # Under the lock, no thread is between its check of ``cancelled`` and the seeding.
        with self.lock:
            self.cancel()
        if self.granted is not None:
            self.granted.give_back()


class BlockAccess(AbstractContextManager[None]):
    """The access of one block: requested, given, perhaps lent, and given back."""

    def __init__(self, run: GeneratorAccess, seed: tuple[str, int] | None = None) -> None:
        self.run = run
        self._seed = seed
        self._device = run.seeds.device
        self._request: int | None = None
        # The frame that executes the block.
        self._frame: FrameType | None = None
        # The access of the enclosing block on this thread, which it has lent.
        self.outer: BlockAccess | None = None
        # The process's states, while the block's are in place.
        self._before: GeneratorStates | None = None
        # The block's states, while its access is lent.
        self._own: GeneratorStates | None = None
        self._woken: SimpleQueue[None] | None = None

    def __enter__(self) -> None:
        self._frame = sys._getframe(1)
        self.outer = _innermost()
        if self._seed is None and self.outer is not None:
            self._own = self.outer._own
        try:
            self.request()
            this_thread.access = self
        # An interrupted request must not stay in line, where all later ones would wait behind it.
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *failure: object) -> None:
        if self._seed is None and self.outer is not None:
            self.lend()
            # The outer block may belong to another device, and so have other generators.
            if self._own is not None:
                self.outer._own = {**(self.outer._own or {}), **self._own}
        self.give_back()
        this_thread.access = self.outer
        self._frame = self.outer = None
        if self._request is not None:
            self.run.counter.advance(self._request + 1)

    def request(self) -> None:
        """Wait for this block's turn in the run, and then for access.

        Raises:
            Cancelled: The run has failed, or was closed.
        """
        request = self.run.next_request()
        self.run.counter.wait(request)
        self.run.granted = self
        self._request = request
        self.take()

    def take(self) -> None:
        """Wait for access, and put this block's states in place.

        Raises:
            Cancelled: The run has failed, or was closed.
        """
        _queue[self] = None
        self._wait()
        with self.run.lock:
            if self.run.cancelled:
                raise Cancelled
            if self._own is None and self._seed is None:
                return
            self._before = self._device.generator_states()
            if self._own is not None:
                self._device.set_generator_states(self._own)
            elif self._seed is not None:
                self.run.seeds.begin(*self._seed)

    def lend(self) -> None:
        """Keep this block's states, and give access back until the next ``take``."""
        with self.run.lock:
            if self._before is not None:
                self._own = self._device.generator_states()
        self.give_back()

    def take_back(self, failure: type[BaseException] | None) -> None:
        """End the loan; ``failure`` is the type of the exception that the call raises.

        Raises:
            Cancelled: The run of the task or the iterator has failed meanwhile.
        """
        if self is not _innermost():
            # The block that lent the access was interrupted and has ended.
            return
        try:
            self.take()
        except Cancelled:
            self.give_back()
            # An error of the call is raised instead of ``Cancelled``.
            if failure is None or failure is StopIteration:
                raise

    def give_back(self) -> None:
        """Restore the generators, and wake the next block in the queue.

        May be called by any thread.
        """
        with self.run.lock:
            if self._before is not None:
                self._device.set_generator_states(self._before)
                self._before = None
        _queue.pop(self, None)
        if (first := _first()) is not None:
            first.wake()

    def wake(self) -> None:
        """Wake the block if it waits. This takes no lock."""
        if self._woken is not None:
            self._woken.put(None)

    def _wait(self) -> None:
        while (first := _first()) is not self:
            if self.run.cancelled:
                raise Cancelled
            # The queue has to exist before the last look: a wake-up that comes before it would be
            # lost.
            if self._woken is None:
                self._woken = SimpleQueue()
                continue
            try:
                self._woken.get(timeout=WAKE_S)
            except Empty:
                if first is not None and not first.is_executed():
                    first.give_back()

    def is_executed(self) -> bool:
        """Return whether the block is still being executed."""
        frame = self._frame
        return frame is not None and is_executed(frame)


class _Thread(threading.local):
    # The access of the innermost block; None for most callers.
    access: BlockAccess | None = None


this_thread = _Thread()
_queue: dict[BlockAccess, None] = {}
"""The block that has access, followed by the blocks that wait for it, in this order."""


def _first() -> BlockAccess | None:
    return next(iter(_queue.copy()), None)


def _innermost() -> BlockAccess | None:
    """Return the access, given or lent, of the innermost block that the calling thread is in."""
    while (access := this_thread.access) is not None and not access.is_executed():
        # The block was interrupted before it could give back its access.
        access.give_back()
        this_thread.access = access.outer
    return access


def lend_access() -> BlockAccess | None:
    """Lend the access that the calling thread has, if any, until it is taken back."""
    access = _innermost()
    if access is None or access not in _queue:
        return None
    access.lend()
    return access


def _in_child() -> None:
    # In a forked child nobody else has access, and a lock may be one of a thread that is not there.
    # The generators stay as they are: that thread may have locked them, too.
    for access in _queue:
        access.run.lock = threading.RLock()
    _queue.clear()


os.register_at_fork(after_in_child=_in_child)
