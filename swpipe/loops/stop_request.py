"""A stop from outside, by a signal or a time limit: all ranks' loops end after the same step.

    rank 0    step 7 | step 8 | step 9 |         at 9 when rank 1 is asked to stop
    rank 1    step 7 | step 8 ~~ | step 9 |      SIGTERM in step 8
                                       ^ where both end: the first place that no rank has passed

No step waits for another rank, and no collective is added. A thread of each rank polls the job's
store, a few times a second. When some rank was asked to stop, each rank's thread holds its loop
back from the next step, writes the loop's place, and reads the places of all ranks. A rank that
hangs in a collective, waiting for another rank's loop, still answers, because its thread does.

A place is a tuple: the number of the pass, the number of the step, and within the step the same two
numbers of a pass over an inner loop. Tuples compare in the order in which a program reaches the
places, also where the data of some ranks ends earlier.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, Self, TypeAlias, TypeVar

import torch.distributed as dist

from swpipe._distributed.agreement import name_ranks
from swpipe._distributed.rank_checks import is_alone, job_store
from swpipe._engine.waiting import ProgressCounter, WorkerThread
from swpipe.core.messages import shown
from swpipe.errors import add_note

Item = TypeVar("Item")
StepPlace: TypeAlias = tuple[int, ...]

LOOK_S = 0.2
"""Seconds between two polls for a stop of another rank; 1 ms more for each rank."""

ANSWER_S = 60.0
"""Seconds that ranks wait for each other's answers; the length of a step does not matter."""

_ANSWERS_S = 0.01  # seconds between two polls for these answers

_GRACE_S = 2.0  # seconds that leave() waits for the thread to end

# The number of the next stop request. Ranks enter the same requests in the same order, so equal
# numbers give equal keys in the store.
_numbers = itertools.count()


class StopRequest:
    """A context manager that ends loops after a whole step if any rank was asked to stop.

    Enter it in the main thread, after ``init_process_group``; each rank enters the same number of
    stop requests, in the same order. Within the block the signals do nothing else; afterwards they
    have their earlier handlers. Processes that are forked within the block have the earlier
    handlers, too. A second SIGINT is handled by the earlier handler.

    Attributes:
        reason: The reason for the stop, such as "SIGTERM on rank 1", once a loop was ended; empty
            before.

    Args:
        signals: Names of the signals that ask for a stop, on any rank.
        after_s: Seconds after the beginning of the block at which a stop is asked for; None for
            never.

    Raises:
        ValueError: There is no such signal, or it cannot be handled; or ``after_s`` is not above 0.
    """

    def __init__(
        self, signals: Iterable[str] = ("SIGTERM",), *, after_s: float | None = None
    ) -> None:
        names = [signals] if isinstance(signals, str) else [*signals]
        for name in names:
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
                raise ValueError(
                    f"signals has {shown(name)}: give names of signals that a process can handle, "
                    "such as 'SIGTERM'"
                )
        self._signals = [signal.Signals[name] for name in names]
        number = isinstance(after_s, int | float) and not isinstance(after_s, bool)
        if after_s is not None and not (number and after_s > 0):
            raise ValueError(f"after_s is {shown(after_s)}: give seconds, above 0, or None")
        self.reason = ""
        self._after_s = math.inf if after_s is None else after_s
        self._until = math.inf
        self._earlier: dict[signal.Signals, Any] = {}
        self._asked = ""
        self._ranks: _Ranks | None = None
        self._at: StepPlace = (0,)
        self._lock = threading.Lock()  # held by the ranks' thread while the loop must not go on
        # Iterators of ended loops: dropping them would end their passes before the user saves.
        self._held: list[Iterator[Any]] = []

    @property
    def requested(self) -> bool:
        """Whether a loop was ended by a stop, on all ranks alike: save, and leave the loop."""
        return bool(self.reason)

    def request(self, reason: str = "request()") -> None:
        """Ask for a stop, on one rank or several, from any thread."""
        self._asked = self._asked or reason

    def watch(self, loop: Iterable[Item], *, every: int = 1) -> WatchedLoop[Item]:
        """Return the loop, which a stop ends: ``for batch in stop.watch(loop)``.

        After a stop the loop's iterator is kept in place until the end of the block, so that
        ``loop.state_dict()`` is the state in the body of the last step. Each later pass over a
        watched loop is empty.

        Args:
            loop: The iterable; all ranks watch the same loops.
            every: The number of steps between two places where the loop may end, such as the
                batches of an accumulation.

        Raises:
            ValueError: ``every`` is no integer from 1.
            RuntimeError: In a pass: this request is not entered, or was entered before
                ``init_process_group``; or a stop was asked for, and another rank has not answered.
        """
        if type(every) is not int or every < 1:
            raise ValueError(f"every is {shown(every)}: give an integer from 1")
        return WatchedLoop(self, loop, every)

    def _steps(self, items: Iterator[Item], begun: StepPlace, every: int) -> Iterator[Item]:
        try:
            for step in itertools.count(1):
                try:
                    item = next(items)
                except StopIteration:
                    return
                except Exception as error:
                    self._note(error)
                    raise
                yield item
                del item
                # This frame must not keep a batch while the next one is made.
                if step % every == 0 and self._ends((*begun, step, 0)):
                    self._held.append(items)
                    return
        finally:
            # The next pass has a greater place, also after a break, so places never go back.
            self._move((*begun[:-1], begun[-1] + 1))

    def _move(self, at: StepPlace) -> None:
        """Note the loop's place; wait while the ranks agree on the last one."""
        with self._lock:
            self._at = at

    def _ends(self, at: StepPlace) -> bool:
        """Return whether the loop ends at this place, and move there."""
        self._move(at)
        self.reason = self._ranks.why_stop() if self._ranks is not None else self._why()
        return self.requested

    def _why(self) -> str:
        """Return why this rank is to stop; empty if it is not."""
        if not self._asked and time.monotonic() >= self._until:
            self._asked = f"after_s={self._after_s:g} s"
        return self._asked

    def _note(self, error: Exception) -> None:
        # A signal to the whole process group ends the workers, and the loader raises an error.
        if self._asked in signal.Signals.__members__:
            add_note(
                error,
                f"swpipe: {self._asked} had come before. If the launcher sent it to the loader's "
                "workers, too, as torchrun does, let them leave its process group: "
                "DataLoader(worker_init_fn=...), a function that calls os.setpgrp()",
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only sets a flag: a handler runs between any two bytecodes and must not take a lock.
        self.request(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(number, self._earlier[signal.SIGINT])

    def _restore(self) -> None:
        """Give the signals their earlier handlers again."""
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier or signal.SIG_DFL)  # None: not set by Python code
        self._earlier.clear()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread() and self._signals:
            raise RuntimeError(
                "only the main thread may handle signals: enter StopRequest there, or give it "
                "signals=() and call request()"
            )
        self._until = time.monotonic() + self._after_s
        self._ranks = None if is_alone() else _Ranks(self)
        for number in self._signals:
            self._earlier[number] = signal.signal(number, self._handle)
        _entered.append(self)
        return self

    def __exit__(self, *failure: object) -> None:
        self._restore()
        _entered.remove(self)
        if self._ranks is not None:
            self._ranks.leave()
        self._held.clear()


@dataclass(frozen=True, eq=False)
class WatchedLoop(Generic[Item]):
    """A loop that a ``StopRequest`` may end; made by ``StopRequest.watch``."""

    _stop: StopRequest
    _loop: Iterable[Item]
    _every: int

    def __iter__(self) -> Iterator[Item]:
        """Begin one pass now, and return its iterator; after a stop, an empty one."""
        stop = self._stop
        if stop not in _entered or (stop._ranks is None and not is_alone()):
            raise RuntimeError(
                "the stop request is not entered, or was entered before torch.distributed was "
                "initialised: write `with StopRequest(...) as stop` after init_process_group"
            )
        # The place (pass, 0, 0) comes before the first step, so a stop can end the pass here.
        begun = stop._at
        if stop._ends((*begun, 0, 0)):
            return iter(())
        return stop._steps(iter(self._loop), begun, self._every)

    def __len__(self) -> int:
        """Return the loop's length."""
        return len(self._loop)  # type: ignore[arg-type]


class _Ranks:
    """The places of this rank and of all ranks in their loops, exchanged over the job's store.

    Args:
        stop: The request of this rank.
    """

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._store = job_store()
        key = f"swpipe/stop/{next(_numbers)}"
        self._any = f"{key}/any"
        self._keys = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
        self._own = self._keys[dist.get_rank()]
        self._last: StepPlace | None = None
        self._reason = ""
        self._failure: RuntimeError | None = None
        self._left = ProgressCounter()
        self._thread = WorkerThread("swpipe-stop", self._listen)

    def why_stop(self) -> str:
        """Return why the loop ends at its place; empty if it goes on.

        Raises:
            RuntimeError: This rank is to stop, and the ranks could not agree where.
        """
        if self._failure is not None and (why := self._stop._why()):
            raise RuntimeError(
                f"this rank is to stop ({why}), and the ranks could not agree where: "
                f"{self._failure}"
            ) from self._failure
        return self._reason if self._last is not None and self._stop._at > self._last else ""

    def leave(self) -> None:
        """End the thread; no rank waits for this one any more."""
        self._left.advance(1)
        self._thread.join(_GRACE_S)

    def _listen(self) -> None:
        try:
            while not self._left.reaches(1, LOOK_S + 1e-3 * len(self._keys)):
                if self._stop._why():
                    self._store.set(self._any, "")
                # Any rank's request sets one key, so a poll costs one look-up and not one per rank.
                if self._store.check([self._any]):
                    # With the lock held, _move() blocks: the place that is written stays true.
                    with self._stop._lock:
                        self._agree()
                    return
            # The block ends without a stop. A rank that stops later reads this place, and does not
            # wait for this rank's answer.
            self._tell()
        except RuntimeError as error:  # the store has gone, or a rank has not answered
            self._failure = error

    def _tell(self) -> None:
        self._store.set(self._own, json.dumps([self._stop._at, self._stop._why()]))

    def _agree(self) -> None:
        self._tell()
        deadline = time.monotonic() + ANSWER_S
        while not self._store.check(self._keys):
            if time.monotonic() > deadline:
                silent = [k for k, key in enumerate(self._keys) if not self._store.check([key])]
                raise RuntimeError(
                    f"{name_ranks(silent)} did not answer within {ANSWER_S:g} s, and has ended, "
                    "hangs, or has no StopRequest: each rank enters as many, in the same order"
                )
            if self._left.reaches(1, _ANSWERS_S):
                return
        # The greatest place is the first one that no rank has passed: all ranks can end there.
        answers = [json.loads(answer) for answer in self._store.multi_get(self._keys)]
        reasons = (f"{why} on rank {rank}" for rank, (_, why) in enumerate(answers) if why)
        self._reason = next(reasons)
        self._last = max(tuple(at) for at, _ in answers)


_entered: list[StopRequest] = []
_masks = threading.local()  # the signal mask before the fork, of each thread that forks


def _before_fork() -> None:
    """Block the handled signals, so that none reaches the child before its handlers are set."""
    numbers = [number for stop in _entered for number in stop._earlier]
    _masks.earlier = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.earlier)


def _after_fork_in_child() -> None:
    # The child is no rank: it must not ask the job to stop when it gets a signal.
    for stop in reversed(_entered):
        stop._restore()
    _entered.clear()
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
