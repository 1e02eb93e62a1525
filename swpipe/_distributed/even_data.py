"""Agreement of ranks whose data ends at different steps: all stop together, or shorter ones pad.

A rank that runs out of batches while others continue leaves them waiting in their collectives. Here
each rank tells all ranks, for each step, whether it has a batch. A step starts only when all ranks
have answered, and all ranks make the same decision::

    step        0    1    2    3    4
    rank 0      a    b    c    d    e      has five batches
    rank 1      p    q    r    -           has three
    "stop"      ^    ^    ^                d and e stay with rank 0
    "pad"       ^    ^    ^    P    P      rank 1 gets batches from ``pad``
    "error"     ^    ^    ^    !           both raise: the data must end at the same step

Each step is agreed ``ahead`` steps in advance, over a separate gloo group. All ranks end or fail at
the same step. If a rank dies, fails, or does not answer in time, every other rank raises an error.

When all ranks leave a pass, a thread that pulls ahead may have asked for more steps on some ranks
than on others. So each pass of an ``EvenLoader`` begins with an agreement of its own, for which
each rank asks again until all ranks do::

    rank 0    step 7   step 8   step 9   begin              left at 6, pulled to 9
    rank 1    step 7   begin    begin    begin   step 0     left at 6, pulled to 7
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from swpipe._distributed.agreement import name_ranks
from swpipe._distributed.pull_limit import PullLimit
from swpipe._distributed.rank_checks import host_group
from swpipe._engine.waiting import Cancelled
from swpipe.core.loaders import LoaderAround

Ends: TypeAlias = Literal["stop", "pad", "error"]
Pad: TypeAlias = Callable[[Any], Any]
"""A function from the rank's last batch, or ``NO_BATCH``, to a batch that does not count."""

_GLOO_LATER_S = 60.0

# The status of a rank for a step. 0 is what a tensor has before the answer arrives.
_HAS = 1
_ENDED = 2
_FAILED = 3
_CANNOT_PAD = 4
_NOT_PULLED = 5
# A pass begins: ``_BEGINS`` + 1 + the number of batches left, or ``_BEGINS`` if it is not known.
_BEGINS = 16
_NO_ANSWER = 0
_UNKNOWN = -1
_MOST = 2**31 - 1 - _BEGINS

_TAIL = 16
"""The divisor of the last part of a pass of known length, whose steps are agreed one by one."""


class _NoBatch:
    def __repr__(self) -> str:
        return "NO_BATCH"


NO_BATCH = _NoBatch()
"""The argument of a ``Pad`` on a rank that has had no batch (None is a valid batch)."""


class RankDataError(RuntimeError):
    """Another rank's data failed, or that rank died or did not answer in time."""


class OutOfStepError(RankDataError):
    """The ranks cannot agree on a step any more: their collectives would not match."""


class UnevenDataError(RankDataError):
    """The data of some ranks ended, and the data of other ranks did not."""


def pad_with(batch: Any) -> Pad:
    """Return a pad that gives the same batch each time."""
    return lambda _: batch


def pad_with_last(weight: str) -> Pad:
    """Return a pad that repeats the rank's last batch with row weights of zero.

    ``weight`` is the attribute or key of the row weights, which the loss must apply.
    """

    def pad(last: Any) -> Any:
        if last is NO_BATCH:
            raise ValueError(
                "this rank has had no batch that could be repeated at zero weight: give the rank "
                "some data, or pad with a given batch (pad_with)"
            )
        # A shallow copy: the batch may still be in use, so only the weights are replaced.
        clone = copy.copy(last)
        if isinstance(last, dict):
            clone[weight] = torch.zeros_like(last[weight])
        else:
            object.__setattr__(clone, weight, torch.zeros_like(getattr(last, weight)))
        return clone

    return pad


class EvenData:
    """An agreement that gives all ranks the same number of batches.

    Creating one is a collective of the group.

    Args:
        ends: "stop": all ranks stop where the first rank's data ends. "pad": all ranks continue to
            the end of the longest data, and ranks without data get batches from ``pad``. "error":
            if the data does not end at the same step, all ranks raise ``UnevenDataError``.
        pad: A function that makes pads; required with "pad".
        ahead: How many steps in advance a step is agreed, from 0; as many batches are pulled early.
        group: The group of ranks; None for all. Without torch.distributed there is one rank.
        timeout_s: The time in seconds to wait for the answer of another rank.

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
            raise ValueError(f"ahead is {ahead}: give a number of steps, from 0")
        self.ends = ends
        self.pad = pad
        self.ahead = ahead
        self.timeout_s = timeout_s
        self.rank = 0
        self.size = 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank(group)
            self.size = dist.get_world_size(group)
            # Our time-out starts with the wait, gloo's with the request. Gloo's must be later, or
            # else a silent rank would be reported as a dead one.
            self._group = host_group(group, 2 * timeout_s + _GLOO_LATER_S)

    def over(self, loader: Iterable[Any]) -> EvenIterator:
        """Return one pass over this rank's data, together with the other ranks.

        All ranks must start their n-th pass together, and end it or leave it after the same step.
        """
        return EvenIterator(self, iter(loader))

    def loader(self, loader: Iterable[Any]) -> EvenLoader:
        """Return a loader of agreed passes, for a plain loop, or for ``overlap`` and ``ahead``.

        All ranks must start their n-th pass together, and end it or leave it after the same step.
        To resume, save the ``state_dict`` of the loop that ``overlap`` or ``ahead`` returns: the
        state of ``loader`` itself is ahead of the body.

        Raises:
            TypeError: ``loader`` is an iterator, which has only one pass.
        """
        if isinstance(loader, Iterator):
            raise TypeError(
                f"the loader is an iterator ({type(loader).__name__}), which has one pass: give "
                "the loader that makes it, or iterate over over(iterator)"
            )
        return EvenLoader(self, loader)

    def close(self) -> None:
        """Destroy the process group; all iterators must have ended on all ranks."""
        group = self._group
        self._group = None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        if failure[0] is None:
            self.close()

    def exchange_status(self, status: int) -> tuple[Tensor, dist.Work | None]:
        """Start to exchange the ranks' statuses for a step; return the tensor and pending work."""
        own = torch.full((self.size,), status, dtype=torch.int32, device="cpu")
        if self._group is None:
            return own, None
        # Each rank sends its status to every rank, so the latency is one message; an all-reduce
        # goes around a ring. A status that has not arrived stays _NO_ANSWER, which shows whose it
        # is.
        statuses = torch.zeros_like(own)
        work = dist.all_to_all_single(statuses, own, group=self._group, async_op=True)
        return statuses, work

    def silence(self, statuses: Tensor, question: str) -> OutOfStepError:
        """Return an error that names the ranks whose statuses have not arrived in time."""
        silent = [rank for rank, status in enumerate(statuses.tolist()) if status == _NO_ANSWER]
        return OutOfStepError(
            f"{name_ranks(silent) if silent else 'some rank'} did not answer within "
            f"{self.timeout_s:g} s (timeout_s) whether it {question}: it hangs, or its loader or "
            "one of its tasks takes longer than that"
        )


class _Pulled(NamedTuple):
    """The result of a pull: a batch, an error, or the end of the data."""

    batch: Any
    error: Exception | None
    status: int


class _Agreement(NamedTuple):
    """The agreement on one step, complete as soon as the statuses of all ranks have arrived."""

    own: _Pulled
    statuses: Tensor
    work: dist.Work | None


class EvenLoader(LoaderAround):
    """A loader whose passes have equally many batches on all ranks; made by ``EvenData.loader``."""

    def __init__(self, data: EvenData, loader: Iterable[Any]) -> None:
        self._data = data
        self.loader = loader
        if data.pad is not None:
            self.touches = "pads by a function, which may read what the loop changes"
        self._last: Callable[[], EvenIterator | None] = lambda: None

    def __iter__(self) -> EvenIterator:
        """Begin a pass and return its iterator."""
        begun = EvenIterator(self._data, iter(self.loader))
        self._last = weakref.ref(begun)
        return begun

    def leave(self) -> None:
        """End a call, on any thread, in which the last pass waits for other ranks."""
        if (begun := self._last()) is not None:
            begun.leave()


class EvenIterator:
    """One pass over one rank's data, which has returned ``steps`` batches, ``padded`` of them pads.

    A pass begins with an agreement on the number of batches that each rank has left. If all ranks
    know theirs, as many steps need no further message, except for the last few (``_TAIL``). All
    other steps are agreed one by one::

        rank 0    begin, 40 left    38 steps without a message    step 38   step 39   end
        rank 1    begin, 41 left    38 steps without a message    step 38   step 39   one more

    An error of one rank's data is agreed like a batch: all ranks raise at that step, and may
    continue. The batches that other ranks have for the step, and all batches that were pulled
    early, come again. In steps without a message the other ranks do not learn of the error: the
    rank uses its next batch for the step, so that the ranks stay in step, and has one batch less at
    the end of the pass.

    Attributes:
        source: The rank's own data.
        over: Whether the pass has ended or cannot be continued.
        paused: Whether the pass pulls no more, and ends after the steps that the ranks have agreed
            on.
        left: Whether the pass was left, so that no call waits for the other ranks any more.
        raised: The errors of ``source`` that came directly before the batch returned last.

    Args:
        data: The agreement of the ranks.
        source: The rank's own data.
        length: The number of batches left in ``source``; None if it is not known.
        keeps_step: In steps without a message, keep errors in ``raised`` instead of raising them.
        limited: Whether a pull that takes longer than ``data.timeout_s`` ends the loop, also on
            another thread than the caller's.
    """

    def __init__(
        self,
        data: EvenData,
        source: Iterator[Any],
        *,
        length: int | None = None,
        keeps_step: bool = False,
        limited: bool = True,
    ) -> None:
        self.steps = 0
        self.padded = 0
        self.source = source
        self.over = self.paused = self.left = False
        self.raised: list[Exception] = []
        self._data = data
        self._length = length
        self._keeps_step = keeps_step
        self._limit: PullLimit | None = None
        if limited and data.size > 1:
            caller = threading.get_ident()
            self._limit = PullLimit(self, caller, data.timeout_s, EvenIterator._slow)
        self._begun = False
        self._beginning: tuple[Tensor, dist.Work | None] | None = None
        # The number of coming steps that need no agreement.
        self._free = 0
        # The number of this rank's batches beyond these steps.
        self._spare = 0
        # Pulled batches and errors on which the ranks have to agree again.
        self._line: deque[_Pulled] = deque()
        self._ahead: deque[_Agreement] = deque()
        self._last: Any = NO_BATCH
        self._data_ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next step's batch.

        Raises:
            StopIteration: All ranks have ended.
            OutOfStepError: Another rank died, did not answer within ``timeout_s``, or is in another
                pass; or this rank has fewer batches than its length promised.
            RankDataError: Another rank's data failed at this step.
            UnevenDataError: With "error", the data of only some ranks has ended.
            Exception: An error of this rank's own data, or of its pad.
        """
        if self.over or (self.paused and not self._ahead):
            raise StopIteration
        try:
            if not self._begun:
                self._begin()
            if self._free:
                return self._next_free()
            return self._next_agreed()
        except OutOfStepError:
            self._end()
            raise

    def leave(self) -> None:
        """Leave the pass: no call waits any more for the other ranks or for this rank's data."""
        self.left = True
        if self._limit is not None:
            self._limit.end()

    def _end(self) -> None:
        self.over = True
        self._last = NO_BATCH
        if self._limit is not None:
            self._limit.end()

    agreed = True

    def batches_left(self) -> int | None:
        """Return None, because the data of other ranks may end earlier."""

    @property
    def waiting(self) -> int:
        """The number of batches that were pulled for later steps."""
        pulled = [*self._line, *(agreement.own for agreement in self._ahead)]
        return 0 if self.over else sum(own.status == _HAS for own in pulled)

    def rest(self) -> Iterator[Any]:
        """Return an iterator over this rank's unused batches, after the end of the pass.

        Raises:
            RuntimeError: The pass has not ended.
        """
        if not self.over:
            raise RuntimeError("the pass has not ended: call rest() after its last step")
        batches = [own.batch for own in self._line if own.status == _HAS]
        return itertools.chain(batches, () if self._data_ended else self.source)

    # ------------------------------------------------------------------ steps without a message

    def _begin(self) -> None:
        """Agree that a pass begins, and on the number of steps for which all ranks have batches."""
        length = _UNKNOWN if self._length is None else min(self._length, _MOST - 1)
        while not self._begun:
            # Kept until it is complete, so that a call that was interrupted here can be repeated.
            if self._beginning is None:
                self._beginning = self._data.exchange_status(_BEGINS + length + 1)
            statuses = self._await(*self._beginning, "begins a pass")
            self._beginning = None
            # A rank that is still in the last pass answers with another status: ask again.
            self._begun = min(statuses) >= _BEGINS
        least = min(statuses) - _BEGINS - 1
        # No rank's data ends.
        if least == _MOST - 1:
            self._free = self._spare = sys.maxsize
        elif least > 0:
            # The last steps, at least two, are agreed one by one. Their batches can replace batches
            # that failed in steps without a message.
            self._free = max(0, least - max(2, least // _TAIL))
            self._spare = length - self._free

    def _next_free(self) -> Any:
        while True:
            try:
                batch = self._next_own()
                break
            except StopIteration:
                raise self._lacks_batches() from (self.raised[-1] if self.raised else None)
            except OutOfStepError:
                raise
            except Exception as error:
                # The failed batch is replaced by a spare one. Without a spare batch the other ranks
                # would run a step that this rank cannot run.
                self._spare -= 1
                if self._spare < 0:
                    raise self._lacks_batches() from error
                if not self._keeps_step:
                    raise
                self.raised.append(error)
        self._free -= 1
        self.steps += 1
        return batch

    def _next_own(self) -> Any:
        limit = self._limit
        if limit is None:
            return next(self.source)
        # A new object for each pull: the watching thread can tell one long pull from many short
        # ones.
        limit.began = object()
        try:
            return next(self.source)
        except BaseException as error:
            if limit.exceeded is None:
                raise
            # The watching thread has interrupted the loader's code, which may have raised another
            # error.
            raise limit.exceeded from error
        finally:
            limit.began = None

    def _slow(self) -> OutOfStepError:
        return OutOfStepError(
            f"the loader of rank {self._data.rank} ({type(self.source).__name__}) has not returned "
            f"a batch within {self._data.timeout_s:g} s, for step {self.steps} or a later one: the "
            "other ranks wait for it. It hangs, or is slower than that (timeout_s)"
        )

    def _lacks_batches(self) -> OutOfStepError:
        return OutOfStepError(
            f"the data of rank {self._data.rank} has no batch for step {self.steps}, and its "
            f"length was {self._length}: the other ranks run that step. Let its length be the "
            "number of its batches, or give an iterator without one (a generator): the ranks then "
            "agree on each step"
        )

    # ------------------------------------------------------------------- steps agreed one by one

    def _next_agreed(self) -> Any:
        # Ask for ``ahead`` steps in advance, so that the answers have arrived when a step begins.
        while not self.paused and len(self._ahead) <= self._data.ahead:
            own = self._pull()
            self._ahead.append(_Agreement(own, *self._data.exchange_status(own.status)))
        own, answers, work = self._ahead[0]
        statuses = self._await(answers, work, f"has a batch for step {self.steps}")
        # A rank that begins a pass while this one is in the middle of one never gets in step again.
        if max(statuses) >= _BEGINS:
            began = [rank for rank, status in enumerate(statuses) if status >= _BEGINS]
            raise OutOfStepError(
                f"{name_ranks(began)} began another pass before step {self.steps} of this one: "
                "leave a pass on all ranks after the same step, and give loops that run at the "
                "same time an EvenData each"
            )
        # All ranks have the same statuses, so each of them comes to the same decision.
        goes_on = _HAS in statuses if self._data.ends == "pad" else _ENDED not in statuses
        wrong = {_FAILED, _CANNOT_PAD} if goes_on else {_FAILED}
        failed = [rank for rank, status in enumerate(statuses) if status in wrong]
        if (failed or not goes_on) and self.paused:
            # The error, or the end, comes when the pass continues.
            raise StopIteration
        if failed or not goes_on:
            self._put_back()
        if failed:
            if own.status in wrong:
                self._line.popleft()
            raise own.error or RankDataError(
                f"the data of {name_ranks(failed)} failed at step {self.steps}: see the error "
                "there. No batch of the other ranks is lost, and all ranks may continue"
            )
        if not goes_on:
            self._end()
            if self._data.ends == "error" and _HAS in statuses:
                raise _uneven(statuses, self.steps)
            raise StopIteration
        self._ahead.popleft()
        self.steps += 1
        self.padded += own.status == _ENDED
        return own.batch

    def _pull(self) -> _Pulled:
        """Return this rank's batch, error or end for the next step.

        After an error the data is not used before the error was raised: the step is agreed again.
        """
        if any(agreement.own.error is not None for agreement in self._ahead):
            return _Pulled(NO_BATCH, None, _NOT_PULLED)
        if self._line:
            return self._line.popleft()
        batch = NO_BATCH
        status = _ENDED
        if not self._data_ended:
            try:
                batch = self._next_own()
                status = _HAS
            except StopIteration:
                self._data_ended = True
            except OutOfStepError:
                # A source that agrees itself is out of step: that cannot wait for this step's
                # agreement.
                raise
            except Exception as failure:  # noqa: BLE001 - raised at its step, on all ranks
                return _Pulled(NO_BATCH, failure, _FAILED)
        if self._data.pad is not None:
            if status == _HAS:
                self._last = batch
                return _Pulled(batch, None, status)
            try:
                batch = self._data.pad(self._last)
            except Exception as failure:  # noqa: BLE001 - the same, if that step runs
                return _Pulled(NO_BATCH, failure, _CANNOT_PAD)
        return _Pulled(batch, None, status)

    def _put_back(self) -> None:
        """Complete the agreements on later steps, and put back the batches pulled for them.

        No collective may be left pending.
        """
        for later, agreement in enumerate(self._ahead):
            self._await(
                agreement.statuses, agreement.work, f"has a batch for step {self.steps + later}"
            )
        pulled = [agreement.own for agreement in self._ahead]
        self._ahead.clear()
        # Pads and missing batches are made again; batches and errors are not.
        batches = [own for own in pulled if own.status in (_HAS, _FAILED, _CANNOT_PAD)]
        self._line.extendleft(reversed(batches))

    def _await(self, statuses: Tensor, work: dist.Work | None, question: str) -> list[int]:
        """Return the statuses of all ranks.

        Raises:
            Cancelled: The pass was left.
            OutOfStepError: Some rank died, or did not answer in time.
        """
        if work is not None:
            # Poll, so that Ctrl-C and the pipeline's watchdog can interrupt.
            deadline = time.monotonic() + self._data.timeout_s
            # The pause doubles up to 1 ms: answers usually arrive at once.
            pause_s = 20e-6
            while not work.is_completed():
                if self.left:
                    raise Cancelled
                if time.monotonic() > deadline:
                    silence = self._data.silence(statuses, question)
                    if self._limit is not None:
                        self._limit.raised(silence)
                    raise silence
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1e-3)
            try:
                work.wait()
            except RuntimeError as error:
                raise OutOfStepError(
                    f"another rank ended before it answered whether it {question}: see the error "
                    "of that rank"
                ) from error
        answers: list[int] = statuses.tolist()
        return answers


def _uneven(statuses: list[int], steps: int) -> UnevenDataError:
    ended = [rank for rank, status in enumerate(statuses) if status == _ENDED]
    others = [rank for rank, status in enumerate(statuses) if status == _HAS]
    return UnevenDataError(
        f"the data of {name_ranks(ended)} ended after {steps} batches, and that of "
        f"{name_ranks(others)} did not: a step needs all ranks. Give every rank the same number of "
        "batches, or wrap the loader, on all ranks: EvenData('stop').over(loader) stops all where "
        "the first one's data ends, EvenData('pad', pad=...).over(loader) continues to the end "
        "of the longest"
    )
