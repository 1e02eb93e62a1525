"""A stop from outside, by a signal or a time limit: all ranks' loops end after the same step.

    rank 0    step 7 | step 8 | step 9 |         at 9 when rank 1 is asked to stop
    rank 1    step 7 | step 8 ~~ | step 9 |      SIGTERM in step 8
                                       ^ where both end: the first place that none has passed

No step waits for another rank, and no collective is added. A thread of each rank looks into the
job's store, a few times a second. When some rank was asked to stop, each rank's thread holds its
loop back from the next step, writes how far it is, and reads how far the others are. A rank that
hangs in a collective for which it needs the others' loops answers all the same.

A place is a tuple: the number of the pass, the step, and within the step the same again, of a pass
over another loop. Tuples compare in the order in which a program gets to these places, also where
the data of some ranks ends earlier.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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
"""How often a rank looks whether another one was asked to stop; 1 ms more for each rank."""

ANSWER_S = 60.0
"""How long ranks wait for each other's answers, which do not depend on how long a step takes."""

_ANSWERS_S = 0.01  # how often they look for these

_GRACE_S = 2.0  # for the thread to end

_numbers = itertools.count()  # of stop requests; ranks count alike


class StopRequest:
    """Ends loops after a whole step when this process, or another rank, was asked to stop.

    Use it as a context manager, in the main thread, after ``init_process_group``; each rank enters
    as many, in the same order. Within the block the signals do nothing else; afterwards they have
    their earlier handlers. Processes that are forked within the block have these, too. A second
    SIGINT does what it did before.

    Attributes:
        reason: Such as "SIGTERM on rank 1", once a loop was ended; empty before.

    Args:
        signals: Names of the signals that ask for a stop, on any of the ranks.
        after_s: Seconds after the beginning of the block that do so; None for never.

    Raises:
        ValueError: There is no such signal, or it cannot be handled; or ``after_s`` is not above 0.
    """

    def __init__(
        self, signals: Iterable[str] = ("SIGTERM",), *, after_s: float | None = None
    ) -> None:
        self._signals = [_number(name) for name in ([signals] if type(signals) is str else signals)]
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
        self._held: list[Iterator[Any]] = []

    @property
    def requested(self) -> bool:
        """Whether a loop was ended by a stop: save, and leave. All ranks have the same answer."""
        return bool(self.reason)

    def request(self, reason: str = "request()") -> None:
        """Ask for a stop, on one rank or several, from any thread."""
        self._asked = self._asked or reason

    def watch(self, loop: Iterable[Item], *, every: int = 1) -> WatchedLoop[Item]:
        """The loop, until a stop: ``for batch in stop.watch(loop)``.

        After a stop the loop's iterator is kept where it is until the end of the block, so that
        ``loop.state_dict()`` is that of the body of the last step. Each later pass over a watched
        loop is empty.

        Args:
            loop: What is iterated over; the same loops on all ranks.
            every: The loop ends after a multiple of so many steps of the pass, such as the batches
                of an accumulation.

        Raises:
            ValueError: ``every`` is no integer from 1.
            RuntimeError: In a pass: this is not entered, or was before ``init_process_group``; or
                a stop was asked for, and another rank has not answered.
        """
        if type(every) is not int or every < 1:
            raise ValueError(f"every is {shown(every)}: give an integer from 1")
        return WatchedLoop(self, loop, every)

    def _begin(self, loop: Iterable[Item], every: int) -> Iterator[Item]:
        """A pass, which has begun; an empty one after a stop, which draws nothing."""
        if self not in _entered or (self._ranks is None and not is_alone()):
            raise RuntimeError(
                "the stop request is not entered, or was entered before torch.distributed was "
                "initialised: write `with StopRequest(...) as stop` after init_process_group"
            )
        begun = self._at
        return iter(()) if self._ends((*begun, 0, 0)) else self._steps(iter(loop), begun, every)

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
                if step % every == 0 and self._ends((*begun, step, 0)):
                    self._held.append(items)
                    return
        finally:
            self._move((*begun[:-1], begun[-1] + 1))

    def _move(self, at: StepPlace) -> None:
        self._at = at
        if self._ranks is not None:
            self._ranks.move(at)

    def _ends(self, at: StepPlace) -> bool:
        """Whether no step begins here."""
        self._move(at)
        self.reason = self._ranks.why_stop() if self._ranks is not None else self._why()
        return self.requested

    def _why(self) -> str:
        """Why this rank is to stop; empty if it is not."""
        if not self._asked and time.monotonic() >= self._until:
            self._asked = f"after_s={self._after_s:g} s"
        return self._asked

    def _note(self, error: Exception) -> None:
        if self._asked in signal.Signals.__members__:
            add_note(
                error,
                f"swpipe: {self._asked} had come before. If the launcher sent it to the loader's "
                "workers, too, as torchrun does, let them leave its process group: "
                "DataLoader(worker_init_fn=...), a function that calls os.setpgrp()",
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(number, self._earlier[signal.SIGINT])

    def _restore(self) -> None:
        """Give the signals their earlier handlers."""
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier or signal.SIG_DFL)  # None: not one of Python's
        self._earlier.clear()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread() and self._signals:
            raise RuntimeError(
                "only the main thread may handle signals: enter StopRequest there, or give it "
                "signals=() and call request()"
            )
        self._until = time.monotonic() + self._after_s
        self._ranks = None if is_alone() else _Ranks(self._why)
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


class WatchedLoop(Generic[Item]):
    """A loop that a ``StopRequest`` may end; made by ``StopRequest.watch``."""

    def __init__(self, stop: StopRequest, loop: Iterable[Item], every: int) -> None:
        self._stop = stop
        self._loop = loop
        self._every = every

    def __iter__(self) -> Iterator[Item]:
        """One pass, which begins now."""
        return self._stop._begin(self._loop, self._every)

    def __len__(self) -> int:
        """The loop's length."""
        return len(self._loop)  # type: ignore[arg-type]


class _Ranks:
    """How far this rank is, and how far all ranks go; ``asked`` says why it is to stop."""

    def __init__(self, asked: Callable[[], str]) -> None:
        self._asked = asked
        self._store = job_store()
        key = f"swpipe/stop/{next(_numbers)}"
        self._any = f"{key}/any"
        self._keys = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
        self._own = self._keys[dist.get_rank()]
        self._lock = threading.Lock()  # held while the loop must not go on
        self._at: StepPlace = ()
        self._last: StepPlace | None = None
        self._reason = ""
        self._failure: RuntimeError | None = None
        self._left = ProgressCounter()
        self._thread = WorkerThread("swpipe-stop", self._listen)

    def move(self, at: StepPlace) -> None:
        """The loop is here from now on; waits while the ranks agree."""
        with self._lock:
            self._at = at

    def why_stop(self) -> str:
        """Why the loop ends where it is; empty if it goes on."""
        if self._failure is not None and (why := self._asked()):
            raise RuntimeError(
                f"this rank is to stop ({why}), and the ranks could not agree where: "
                f"{self._failure}"
            ) from self._failure
        return self._reason if self._last is not None and self._at > self._last else ""

    def leave(self) -> None:
        """End the thread; nobody waits for this rank any more."""
        self._left.advance(1)
        self._thread.join(_GRACE_S)

    def _listen(self) -> None:
        try:
            while not self._left.reaches(1, LOOK_S + 1e-3 * len(self._keys)):
                if self._asked():
                    self._store.set(self._any, "")
                if self._store.check([self._any]):
                    with self._lock:
                        self._agree()
                    return
            self._tell()  # whoever stops later has come as far
        except RuntimeError as error:  # the store has gone, or a rank
            self._failure = error

    def _tell(self) -> None:
        self._store.set(self._own, json.dumps([self._at, self._asked()]))

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
        said = [json.loads(one) for one in self._store.multi_get(self._keys)]
        reasons = [f"{why} on rank {rank}" for rank, (_, why) in enumerate(said) if why]
        self._reason = reasons[0]
        self._last = max(tuple(at) for at, _ in said)


def _number(name: str) -> signal.Signals:
    if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(
            f"signals has {shown(name)}: give names of signals that a process can handle, such as "
            "'SIGTERM'"
        )
    return signal.Signals[name]


_entered: list[StopRequest] = []
_masks = threading.local()  # of the threads that fork


def _before_fork() -> None:
    """A signal that comes to the child before it has its handlers waits for these."""
    numbers = [number for one in _entered for number in one._earlier]
    _masks.earlier = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.earlier)


def _after_fork_in_child() -> None:
    for one in reversed(_entered):
        one._restore()
    _entered.clear()
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
