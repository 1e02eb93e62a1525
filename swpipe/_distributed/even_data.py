"""Ranks whose data ends at different steps: all stop at the first end, or the shorter ones pad.

A rank that runs out of batches while others continue leaves them waiting in its collectives. Here
each rank tells the others, for each step, whether it has a batch. A step starts only when all ranks
have answered, and all ranks decide the same::

    step        0    1    2    3    4
    rank 0      a    b    c    d    e      has five batches
    rank 1      p    q    r    -           has three
    "stop"      ^    ^    ^                d and e stay with rank 0
    "pad"       ^    ^    ^    P    P      rank 1 gets batches from ``pad``
    "error"     ^    ^    ^    !           both raise: the data must end at the same step

Each step is agreed ``ahead`` steps in advance, over a separate gloo group. All ranks end or fail at
the same step. A rank that dies, fails, or does not answer in time is an error on all others.

A thread that pulls ahead may have asked for more steps on some ranks than on others when all leave
a pass. So the passes of an ``EvenLoader`` begin with an agreement of their own, for which each rank
asks again until all do::

    rank 0    step 7   step 8   step 9   begin              left at 6, pulled to 9
    rank 1    step 7   begin    begin    begin   step 0     left at 6, pulled to 7
"""

from __future__ import annotations

import copy
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from swpipe._distributed.rank_checks import host_group
from swpipe._engine.waiting import Cancelled
from swpipe.core.keywords import suggests_keywords
from swpipe.core.loaders import LoaderAround

Ends: TypeAlias = Literal["stop", "pad", "error"]
Pad: TypeAlias = Callable[[Any], Any]
"""From the rank's last batch, or ``NO_BATCH``, to a batch that does not count."""

_GLOO_LATER_S = 60.0

_HAS, _ENDED, _FAILED, _CANNOT_PAD, _BEGINS = 1, 2, 3, 4, 5


class _NoBatch:
    def __repr__(self) -> str:
        return "NO_BATCH"


NO_BATCH = _NoBatch()
"""Passed to a ``Pad`` on a rank that has had no batch (None is a valid batch)."""


class RankDataError(RuntimeError):
    """Another rank's data failed, or that rank died or did not answer in time."""


class UnevenDataError(RankDataError):
    """Some ranks' data ended, and that of others did not."""


@suggests_keywords
def pad_with(batch: Any) -> Pad:
    """Pad with the same given batch each time."""
    return lambda _: batch


@suggests_keywords
def pad_with_last(weight: str) -> Pad:
    """Pad with the rank's last batch and zero row weights.

    ``weight`` is the attribute or key of the row weights, which the loss must apply.
    """

    def pad(last: Any) -> Any:
        if last is NO_BATCH:
            raise ValueError(
                "this rank has no batch at all, so none to repeat at zero weight: give it some "
                "data, or pad with a given batch (pad_with)"
            )
        clone = copy.copy(last)
        if isinstance(last, dict):
            clone[weight] = torch.zeros_like(last[weight])
        else:
            object.__setattr__(clone, weight, torch.zeros_like(getattr(last, weight)))
        return clone

    return pad


@suggests_keywords
class EvenData:
    """Gives all ranks the same number of batches. Creating one is a collective of the group.

    Args:
        ends: "stop": all ranks stop where the first one's data ends. "pad": all continue to the
            end of the longest, and those without data get batches from ``pad``. "error": if they do
            not end at the same step, all raise ``UnevenDataError``.
        pad: Required with "pad".
        ahead: How many steps in advance a step is agreed, from 0; so many batches are pulled early.
        group: Which ranks; None for all. Without torch.distributed there is one rank.
        timeout_s: Seconds to wait for the answer of another rank.

    Raises:
        ValueError: An unknown ``ends``, ``pad`` with "stop", no ``pad`` with "pad", or a negative
            ``ahead``.
    """

    def __init__(
        self,
        ends: Ends = "stop",
        *,
        pad: Pad | None = None,
        ahead: int = 1,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if ends not in get_args(Ends):
            raise ValueError(f"ends is {ends!r}: give 'stop', 'pad' or 'error'")
        if (ends == "pad") != (pad is not None):
            raise ValueError(
                f"ends is {ends!r} and pad is {'not ' if pad is None else ''}given: give a pad "
                "with ends='pad', and only then (pad_with and pad_with_last make some)"
            )
        if ahead < 0:
            raise ValueError(f"ahead is {ahead}: it counts steps, from 0")
        self.ends = ends
        self.pad = pad
        self.ahead = ahead
        self.timeout_s = timeout_s
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            # Our timeout starts with the wait, gloo's with the request. Gloo's must be later, or
            # else a silent rank would be reported as a dead one.
            self._group = host_group(group, 2 * timeout_s + _GLOO_LATER_S)

    def over(self, loader: Iterable[Any]) -> EvenIterator:
        """One pass over this rank's data, together with the other ranks.

        All ranks must start their n-th pass together and run it to its end.
        """
        return EvenIterator(self, iter(loader))

    def loader(self, loader: Iterable[Any]) -> EvenLoader:
        """A loader of such passes, for a plain loop, and for ``overlap`` and ``ahead`` around it.

        All ranks must start their n-th pass together, and end it or leave it after the same step.
        Resume by the ``state_dict`` of the loop that ``overlap`` or ``ahead`` makes of it: that of
        ``loader`` itself is ahead of the body.

        Raises:
            TypeError: It is an iterator, which has one pass.
        """
        if isinstance(loader, Iterator):
            raise TypeError(
                f"the loader is an iterator ({type(loader).__name__}), which has one pass: give "
                "the loader that makes it, or iterate over over(iterator)"
            )
        return EvenLoader(self, loader)

    def close(self) -> None:
        """Destroy the process group; all iterators must have ended on all ranks."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        if failure[0] is None:
            self.close()

    def exchange_status(self, status: int) -> tuple[Tensor, dist.Work | None]:
        """Start to exchange the ranks' statuses for the next step."""
        own = torch.full((self.size,), status, dtype=torch.int32, device="cpu")
        if self._group is None:
            return own, None
        # Each rank sends its own to each other: one message of latency. An all-reduce goes around.
        statuses = torch.empty_like(own)
        work = dist.all_to_all_single(statuses, own, group=self._group, async_op=True)
        return statuses, work


class _Pull(NamedTuple):
    batch: Any
    error: Exception | None
    status: int
    statuses: Tensor
    work: dist.Work | None


@suggests_keywords
class EvenLoader(LoaderAround):
    """A loader whose passes have as many batches on all ranks; made by ``EvenData.loader``."""

    def __init__(self, data: EvenData, loader: Iterable[Any]) -> None:
        self._data, self.loader = data, loader
        if data.pad is not None:
            self.touches = "pads by a function, which may read what the loop changes"
        self._last: Callable[[], EvenIterator | None] = lambda: None

    def __iter__(self) -> EvenIterator:
        """One pass, which begins now."""
        begun = EvenIterator(self._data, iter(self.loader), may_be_left=True)
        self._last = weakref.ref(begun)
        return begun

    def leave(self) -> None:
        """End a call of the pass begun last that waits for other ranks, on whatever thread."""
        if (begun := self._last()) is not None:
            begun.left = True


@suggests_keywords
class EvenIterator:
    """One pass over one rank's data; has returned ``steps`` batches, ``padded`` of them pads.

    With ``ends_uneven`` it just ends where only some ranks' data has ended; ``uneven`` is the error
    then. Where it is ``paused``, it pulls no more, and ends after what the ranks have agreed on.
    Passes that ``may_be_left`` begin with an agreement; once ``left``, no call waits for the ranks.
    """

    def __init__(
        self,
        data: EvenData,
        iterator: Iterator[Any],
        *,
        ends_uneven: bool = False,
        may_be_left: bool = False,
    ) -> None:
        self.steps = 0
        self.padded = 0
        self.paused = False
        self.uneven: UnevenDataError | None = None
        self._ends_uneven = ends_uneven
        self._begun = not may_be_left
        self.left = False
        self._data = data
        self._iterator = iterator
        self._ahead: deque[_Pull] = deque()
        self._last: Any = NO_BATCH
        self._data_ended = False
        self._failure: Exception | None = None
        self._over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next step's batch.

        Raises:
            StopIteration: All ranks have ended.
            RankDataError: Another rank failed, died, or did not answer within ``timeout_s``.
            UnevenDataError: With "error", only some ranks' data has ended.
            Exception: What this rank's own data, or its pad, raised.
        """
        if self._over:
            raise StopIteration
        while not self._begun:
            begun = self._await(*self._data.exchange_status(_BEGINS), self.steps)
            self._begun = {*begun} == {_BEGINS} or self._data.size == 1
        while not self.paused and len(self._ahead) <= self._data.ahead:
            self._ahead.append(self._pull())
        if not self._ahead:
            raise StopIteration
        pull = self._ahead.popleft()
        statuses = self._await(pull.statuses, pull.work, self.steps)
        if _BEGINS in statuses:
            self._over = True
            left = [rank for rank, status in enumerate(statuses) if status == _BEGINS]
            raise RankDataError(
                f"ranks {left} have begun another pass before step {self.steps} of this one: leave "
                "a pass on all ranks after the same step, and give loops that run at the same time "
                "an EvenData each"
            )
        goes_on = _HAS in statuses if self._data.ends == "pad" else _ENDED not in statuses
        wrong = {_FAILED, _CANNOT_PAD} if goes_on else {_FAILED}
        if not wrong.isdisjoint(statuses):
            self._end(pull)
            failed = [rank for rank, status in enumerate(statuses) if status in wrong]
            raise pull.error or RankDataError(
                f"the data of ranks {failed} failed at step {self.steps}: see the error there"
            )
        if not goes_on:
            self._end(pull)
            if self._data.ends == "error" and _HAS in statuses:
                self.uneven = _uneven(statuses, self.steps)
                if not self._ends_uneven:
                    raise self.uneven
            raise StopIteration
        self.steps += 1
        self.padded += pull.status == _ENDED
        return pull.batch

    @property
    def waiting(self) -> int:
        """How many batches were pulled for later steps."""
        return sum(pull.status == _HAS for pull in self._ahead)

    def rest(self) -> Iterator[Any]:
        """This rank's unused batches, after the end.

        Raises:
            RuntimeError: The iterator has not ended.
        """
        if not self._over:
            raise RuntimeError("steps are still to come: rest() is what is left after the last")
        kept = [pull.batch for pull in self._ahead if pull.status == _HAS]
        return itertools.chain(kept, () if self._data_ended else self._iterator)

    def _pull(self) -> _Pull:
        batch, error, status = NO_BATCH, self._failure, _FAILED
        if error is None:
            try:
                if not self._data_ended:
                    batch = next(self._iterator, NO_BATCH)
                self._data_ended = batch is NO_BATCH
                status = _ENDED if self._data_ended else _HAS
            except Exception as failure:  # noqa: BLE001 - raised at its step, on all ranks
                error = self._failure = failure
        if status == _HAS and self._data.pad is not None:
            self._last = batch
        if status == _ENDED and self._data.pad is not None:
            try:
                batch = self._data.pad(self._last)
            except Exception as failure:  # noqa: BLE001 - the same, if that step runs
                error, status = failure, _CANNOT_PAD
        return _Pull(batch, error, status, *self._data.exchange_status(status))

    def _end(self, pull: _Pull) -> None:
        """Complete the agreements on later steps: no collective may be left pending."""
        self._over = True
        self._last = NO_BATCH
        for step, later in enumerate(self._ahead, start=self.steps + 1):
            self._await(later.statuses, later.work, step)
        self._ahead.appendleft(pull)

    def _await(self, statuses: Tensor, work: dist.Work | None, step: int) -> list[int]:
        if work is not None:
            # Poll, so that Ctrl-C and the pipeline's watchdog can interrupt.
            deadline, pause_s = time.monotonic() + self._data.timeout_s, 20e-6
            while not work.is_completed():
                if self.left:
                    raise Cancelled
                if time.monotonic() > deadline:
                    self._over = True
                    raise RankDataError(
                        f"some rank has not said within {self._data.timeout_s:g} s whether it has "
                        f"a batch for step {step}: it hangs, or its loader or a task of its own is "
                        "slower than that (timeout_s)"
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1e-3)
            try:
                work.wait()
            except RuntimeError as error:
                self._over = True
                raise RankDataError(
                    f"another rank is gone: it was to say whether it has a batch for step {step}. "
                    "See the error there"
                ) from error
        answers: list[int] = statuses.tolist()
        return answers


def _uneven(statuses: list[int], steps: int) -> UnevenDataError:
    ended = [rank for rank, status in enumerate(statuses) if status == _ENDED]
    others = [rank for rank, status in enumerate(statuses) if status == _HAS]
    return UnevenDataError(
        f"the data of ranks {ended} ended after {steps} batches, and ranks {others} have more: a "
        "step needs all ranks. Give every rank the same number of batches, or wrap the loader, on "
        "all ranks: EvenData('stop').over(loader) stops all where the first one's data ends, "
        "EvenData('pad', pad=...).over(loader) continues to the end of the longest"
    )
