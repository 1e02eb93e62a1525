"""Checks across ranks: equal plans, equal shortcuts, and the rank that failed first.

When one rank fails and its process ends, the collectives of all ranks fail too (with gloo within
milliseconds, as "connection closed by peer"). To tell the cause from its effects, each failing rank
writes its error, its *word*, into the job's store. Errors that are only effects get a note::

    rank 0    ValueError ------------------> word, and the first failure
    rank 1    connection closed by peer ---> word; waits for the first failure or all words: rank 0
    rank 2    killed                         no word: without a first failure, it may be the cause
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import queue
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store

from swpipe._distributed.agreement import Facts, differences, name_ranks, plan_facts
from swpipe.core.messages import plain, shorten
from swpipe.core.plan import PipelinePlan
from swpipe.errors import MOST_IN_MESSAGE, StallError, add_note, write_error

T = TypeVar("T")

STORE_S = 2.0
"""The time in seconds that a failing rank waits for the job's store. Its process may have ended."""

FIRST_FAILURE = "swpipe/first_failure"
"""The store's key for the first failure that no other rank has caused."""

# The store's key for each rank's own failure.
_WORD = "swpipe/failures/{}"

# The time in seconds that a rank with a lost connection waits for the words of the other ranks.
_WORDS_S = 0.5

_LOST = re.compile(r"connection|closed by peer|timed? ?out|socket|gloo|nccl", re.IGNORECASE)

_SHORTCUTS = "swpipe/shortcuts/{}/{}"
ShortcutAct: TypeAlias = Literal["enable", "disable"]

RECENT_S = 60.0
"""The age in seconds above which a failure no longer counts as the cause of a new one."""


class _Line:
    """A connection of swpipe's own to the store of the default group.

    Another thread may be waiting on the group's connection. This connection is opened when plans
    are
    compared, and kept: if the process that holds the store has ended, an open connection fails at
    once,
    while opening one would be retried for longer than the store's time-out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leads_to: Callable[[], Any] = lambda: None
        self._store: Any = None
        # The word that this rank has written about its failure.
        self.left_word: _Word | None = None

    def store(self) -> Any:
        """Return the connection, opened anew if the default group is not that of the last call."""
        default = _get_default_store()
        with self._lock:
            if self._leads_to() is not default:
                self._store = default.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
                # A strong reference would keep the port of a destroyed group's store open.
                self._leads_to = weakref.ref(default)
            return self._store


_line = _Line()


def job_store() -> Any:
    """Return the store of the default group, by a connection that no other thread waits on."""
    return _line.store()


_turns = itertools.count()
"""The number of checks of shortcuts so far; it is equal on all ranks, since all make each check."""


def is_alone() -> bool:
    """Return whether this process is not one of several ranks."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def rank_count() -> int:
    """Return the number of ranks of the job."""
    return 1 if is_alone() else dist.get_world_size()


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a group, by rank. It is a collective of the group.

    A process that is not one of several ranks has one value, its own.
    """
    if is_alone():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def host_group(group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup:
    """Return a new gloo group of the same ranks (None: all), separate from the training's groups.

    Creating it is a collective of these ranks.
    """
    new_group: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group or dist.group.WORLD),
        timeout=dt.timedelta(seconds=timeout_s),
        backend="gloo",
        use_local_synchronization=group is not None,
    )
    # Without this barrier, ranks that are still connecting would report a closed connection if a
    # rank fails here.
    dist.barrier(group=new_group)
    return new_group


def check_same_plan(plan: PipelinePlan, seed: int | None = None) -> None:
    """Compare plans across the ranks of torch.distributed's default group, if there is one.

    Every rank has to call this function: it is a collective. ``seed`` is the seed of random tasks;
    None if there are none.

    Raises:
        RuntimeError: The ranks hold different plans; raised on all of them.

    Warns:
        RuntimeWarning: The ranks have different seeds; on all of them.
    """
    if is_alone():
        return
    # Open the connection now, while the store certainly exists.
    store = _line.store()
    # All ranks reach this call, so an earlier failure was caught and is not the cause of a later
    # one.
    if _line.left_word:
        _withdraw(store, _line.left_word)
        _line.left_word = None
    digests, seeds = zip(*gather((plan.digest(), seed)), strict=True)
    if len(set(digests)) > 1:
        held: list[Facts] = gather(plan_facts(plan))
        raise RuntimeError(
            "the ranks hold different plans, and would wait for each other's collectives for ever: "
            f"{differences(held)}. "
            "Give every rank the same plan (PipelinePlan.digest tells plans apart)"
        )
    if len(set(seeds)) > 1:
        warnings.warn(
            "the ranks draw different random numbers: "
            f"{differences([{'seed': str(own)} for own in seeds])}. Give every rank the same "
            "SWPipeline(seed=...), or ignore this warning where they are to differ",
            RuntimeWarning,
            # The level of the call of the pipeline.
            stacklevel=6,
        )


def check_same_shortcuts(
    digest: str, act: ShortcutAct, names: Collection[str], timeout_s: float
) -> None:
    """Compare the tasks to shortcut from now on across the ranks of the default group, if any.

    A task that communicates would never end if one rank ran it and another rank replayed it. Ranks
    are compared through the job's store, because a collective would come between the collectives of
    iterations in flight.

    Raises:
        RuntimeError: The ranks differ (raised on all), or one of them does not call this function
            within ``timeout_s`` seconds.
    """
    if is_alone():
        return
    turn = next(_turns)
    store = _line.store()
    own = json.dumps([digest, sorted(names)])
    store.set(_SHORTCUTS.format(turn, dist.get_rank()), own)
    try:
        ranks = range(dist.get_world_size())
        others = [_said_by(rank, turn, store, act, timeout_s) for rank in ranks]
    except RuntimeError as error:
        # The other ranks wait in collectives that fail when this rank ends.
        tell_failure(error)
        raise
    if len(set(others)) > 1:
        held = [
            {"plan": plan[:12], "tasks": ", ".join(map(plain, tasks))}
            for plan, tasks in map(json.loads, others)
        ]
        raise RuntimeError(
            "the ranks would shortcut different tasks, or tasks of different plans, and wait for "
            f"each other's collectives for ever: {differences(held)}. Enable the same tasks on all "
            "ranks, and disable the same, in the same order"
        )


def _said_by(rank: int, turn: int, store: Any, act: ShortcutAct, timeout_s: float) -> str:
    key = _SHORTCUTS.format(turn, rank)
    deadline = time.monotonic() + timeout_s
    pause_s = 1e-4
    # Poll instead of waiting in the store, so that Ctrl-C can interrupt.
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"rank {rank} has not {act}d shortcuts within {timeout_s:g} s: {act} the same "
                "tasks on all ranks, between the same two steps, or build the pipeline with "
                "check_ranks=False on ranks that do without the others"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)
    text: str = store.get(key).decode()
    return text


def rank_prefix() -> str:
    """Return a prefix such as "rank 3: "; empty for a process that is not one of several ranks."""
    return "" if is_alone() else f"rank {dist.get_rank()}: "


def abort_process_groups(grace_s: float) -> None:
    """Abort the communication of all process groups, within at most ``grace_s`` seconds.

    NCCL's calls then return with an error; gloo's calls continue.
    """
    try:
        # ``_abort_process_group`` is private (torch 2.13). It gets a time limit, as it may not
        # return.
        within(grace_s, distributed_c10d._abort_process_group)
    except (RuntimeError, ValueError) as error:
        write_error(f"swpipe: the process groups could not be aborted: {error}")


def tell_failure(error: BaseException) -> None:
    """Write this rank's failure to the store, and note on the error which rank may be the cause."""
    if is_alone():
        return
    own = _Word(dist.get_rank(), _said(error), time.time())
    try:
        cause = within(STORE_S, lambda: _cause(own, error))
    except RuntimeError as gone:
        cause = f"whether another rank had failed before is not known: {gone}"
    if cause:
        add_note(error, f"swpipe: {cause}")


def within(seconds: float, act: Callable[[], T]) -> T:
    """Return or raise what ``act`` does; raise RuntimeError if it does neither in time."""
    answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((act(), None))
        except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
            answer.put((None, error))

    # A daemon thread: it cannot be interrupted in the store, and must not keep the process alive.
    threading.Thread(target=run, name="swpipe-store", daemon=True).start()
    try:
        value, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise RuntimeError(f"no answer within {seconds:g} s") from None
    if error is not None:
        try:
            raise error
        finally:
            # The error's traceback refers to this frame, which would be a reference cycle.
            del error
    return value  # type: ignore[return-value]  # there is one, since there is no error


def _said(error: BaseException) -> str:
    text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return shorten(text, MOST_IN_MESSAGE)


class _Word(NamedTuple):
    """The record that a rank leaves of its failure."""

    rank: int
    error: str
    time_s: float

    def before(self, later: _Word) -> bool:
        """Return whether this failure may be the cause of another rank's failure."""
        return self.rank != later.rank and later.time_s - self.time_s <= RECENT_S

    def __str__(self) -> str:
        return f"rank {self.rank} had failed before, which may be the cause: {self.error}"


def _let_down(error: BaseException | None) -> bool:
    """Return whether an error looks like an effect of other ranks.

    That is lost communication, or a stall.
    """
    if error is None or isinstance(error, StallError | ConnectionError | dist.DistError):
        return error is not None
    lost = isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
    return lost or _let_down(error.__cause__)


def _cause(own: _Word, error: BaseException) -> str:
    """Write this rank's word to the store, and return a text about the cause.

    The text is empty if this rank itself is the first to fail.
    """
    store = _line.store()
    store.set(_WORD.format(own.rank), json.dumps(own))
    _line.left_word = own
    # An error of its own is registered as the first failure, unless a recent one is there. An
    # effect is not: it waits for the first failure, or for the words of all ranks.
    if not _let_down(error):
        first = _first_failure(store, own)
        return str(first) if first.before(own) else ""
    ranks = range(dist.get_world_size())
    deadline = time.monotonic() + _WORDS_S
    while True:
        if store.check([FIRST_FAILURE]):
            first = _Word(*json.loads(store.get(FIRST_FAILURE)))
            if first.before(own):
                return str(first)
        missing = _without_word(store, ranks)
        keys = [_WORD.format(rank) for rank in ranks if rank not in missing]
        words = [_Word(*json.loads(text)) for text in store.multi_get(keys)]
        recent = [word for word in words if own.time_s - word.time_s <= RECENT_S]
        # A rank without a recent word may have been killed, which leaves no word.
        silent = sorted({*ranks} - {word.rank for word in recent})
        if not silent or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if silent:
        may_be = "one of them may be" if len(silent) > 1 else "which may be"
        return (
            f"{name_ranks(silent)} reported no failure, {may_be} the cause: killed, stopped, "
            "or ended outside the pipeline"
        )
    stalled = [word for word in recent if word.before(own) and word.error.startswith("StallError")]
    return str(min(stalled, key=lambda word: word.time_s)) if stalled else ""


def _withdraw(store: Any, word: _Word) -> None:
    """Mark a failure as old, so that no rank takes it for a cause.

    It is not deleted: a rank that reads a deleted key would wait for it.
    """
    old = json.dumps(word._replace(time_s=0.0))
    store.set(_WORD.format(word.rank), old)
    # ``compare_set`` reads the key if it exists, where ``get`` would wait for it.
    held = store.compare_set(FIRST_FAILURE, old, old).decode()
    if json.loads(held)[0] == word.rank:
        store.compare_set(FIRST_FAILURE, held, old)


def _without_word(store: Any, ranks: range) -> list[int]:
    """Return the ranks that have left no word, in a few requests for any number of ranks."""
    if store.check([_WORD.format(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    # ``check`` asks for many keys at once, but does not tell which are missing: halve and ask
    # again.
    half = len(ranks) // 2
    return _without_word(store, ranks[:half]) + _without_word(store, ranks[half:])


def _first_failure(store: Any, own: _Word) -> _Word:
    """Return the first recent failure: that of another rank, or else this one, recorded now."""
    held = store.compare_set(FIRST_FAILURE, "", json.dumps(own)).decode()
    first = _Word(*json.loads(held))
    # The job has recovered from that failure: replace it, unless another rank does so first.
    if own.time_s - first.time_s > RECENT_S:
        first = _Word(*json.loads(store.compare_set(FIRST_FAILURE, held, json.dumps(own))))
    return first
