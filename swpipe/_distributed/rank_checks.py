"""Checks across ranks: equal plans, equal shortcuts, and the rank that failed first.

When one rank fails and its process ends, the collectives of all ranks fail too (with gloo within
milliseconds, as "connection closed by peer"). To tell the cause from its effects, each failing rank
appends a record to a log in the job's store. Errors that are only effects get a note::

    rank 0    ValueError ------------------> record with the error: the cause
    rank 1    connection closed by peer ---> record; waits for a cause, or a record of each rank
    rank 2    killed                         no record: without a cause, rank 2 may be the cause
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
from collections.abc import Callable, Collection, Sequence
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

# The store's key for the log of failures, a line of JSON each, since plans were last compared.
_FAILURES = "swpipe/failures/{}"

# The time in seconds that a rank with a lost connection waits for the records of the other ranks.
_RECORDS_S = 0.5

_LOST = re.compile(r"connection|closed by peer|timed? ?out|socket|gloo|nccl", re.IGNORECASE)

_SHORTCUTS = "swpipe/shortcuts/{}/{}"
ShortcutAct: TypeAlias = Literal["enable", "disable"]

RECENT_S = 60.0
"""The age in seconds above which a failure no longer counts as the cause of a new one."""


class _Connection:
    """A connection of swpipe's own to the store of a default group.

    Another thread may be waiting on the group's connection. This connection is opened when plans
    are compared, and kept: if the process that holds the store has ended, an open connection fails
    at once, while opening one would be retried for longer than the store's time-out.

    Attributes:
        store: The store.
        comparisons: The number of comparisons of plans so far, which is equal on all ranks.
    """

    def __init__(self, default: Any) -> None:
        self.store = default.clone()
        self.comparisons = 0


# The keys are weak: a strong reference would keep the port of a destroyed group's store open.
_connections: weakref.WeakKeyDictionary[Any, _Connection] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _connection() -> _Connection:
    """Return the connection to the store of the default group, opened in the first call."""
    default = _get_default_store()
    with _lock:
        if default not in _connections:
            _connections[default] = _Connection(default)
        return _connections[default]


def job_store() -> Any:
    """Return the store of the default group, by a connection that no other thread waits on."""
    return _connection().store


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
    connection = _connection()
    digests, seeds = zip(*gather((plan.digest(), seed)), strict=True)
    # All ranks have reached this call, so an earlier failure was caught and is not the cause of a
    # later one: begin a new log.
    connection.comparisons += 1
    if len(set(digests)) > 1:
        held: list[Facts] = gather(plan_facts(plan))
        raise RuntimeError(
            "the ranks hold different plans, and would wait for each other's collectives forever: "
            f"{differences(held)}. "
            "Give every rank the same plan (PipelinePlan.digest tells plans apart)"
        )
    if len(set(seeds)) > 1:
        warnings.warn(
            "the ranks draw different random numbers: "
            f"{differences([{'seed': str(own)} for own in seeds])}. Give every rank the same "
            "SWPipeline(seed=...), or ignore this warning if they should differ",
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
    store = job_store()
    keys = [_SHORTCUTS.format(turn, rank) for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], json.dumps([digest, sorted(names)]))
    advice = (
        f"{act} the same tasks on all ranks, between the same two steps, or build the pipeline "
        "with check_ranks=False on ranks that do without the others"
    )
    try:
        answers = answers_of_ranks(store, keys, timeout_s, f"{act}d no shortcuts", advice)
    except RuntimeError as error:
        # The other ranks wait in collectives that fail when this rank ends.
        tell_failure(error)
        raise
    if len(set(answers)) > 1:
        held = [
            {"plan": plan[:12], "tasks": ", ".join(map(plain, tasks))}
            for plan, tasks in map(json.loads, answers)
        ]
        raise RuntimeError(
            "the ranks would shortcut different tasks, or tasks of different plans, and wait for "
            f"each other's collectives forever: {differences(held)}. Enable the same tasks on all "
            "ranks, and disable the same, in the same order"
        )


def answers_of_ranks(
    store: Any, keys: Sequence[str], timeout_s: float, omission: str, advice: str
) -> Sequence[bytes]:
    """Wait until all ranks have written their keys to a store, and return the values.

    Args:
        store: The store.
        keys: The key that each rank writes, by rank.
        timeout_s: The largest time in seconds to wait.
        omission: The step that a rank without a key has not done, for an error.
        advice: The fix, for an error.

    Raises:
        RuntimeError: A rank has not written its key in time, or the store is gone.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 1e-4
    # Poll instead of waiting in the store, so that Ctrl-C can interrupt.
    while not store.check(keys):
        if time.monotonic() > deadline:
            silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(f"{name_ranks(silent)} {omission} within {timeout_s:g} s: {advice}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)
    answers: list[bytes] = store.multi_get(keys)
    return answers


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
    kind = _kind(error)
    texts = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    # On 1,000 ranks that lose their communication, the log has to stay short: no rank quotes them.
    text = "" if kind == "lost" else shorten("; ".join(texts), MOST_IN_MESSAGE)
    own = _Failure(dist.get_rank(), time.time(), kind, text)
    try:
        cause = within(STORE_S, lambda: _cause(own))
    except RuntimeError as gone:
        cause = f"it is not known whether another rank had failed before: {gone}"
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


class _Failure(NamedTuple):
    """The record that a rank leaves of its failure.

    Attributes:
        rank: The rank.
        time_s: When it failed, in seconds of ``time.time``.
        kind: "own", or an effect of other ranks: "stall" or "lost", for lost communication.
        error: The error with its notes; empty for lost communication.
    """

    rank: int
    time_s: float
    kind: str
    error: str

    def __str__(self) -> str:
        return f"rank {self.rank} had failed before, which may be the cause: {self.error}"


def _kind(error: BaseException) -> str:
    """Return the kind of a failure, which may be that of an error that it was raised from."""
    if isinstance(error, StallError):
        return "stall"
    lost = isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
    if lost or isinstance(error, ConnectionError | dist.DistError):
        return "lost"
    return "own" if error.__cause__ is None else _kind(error.__cause__)


def _cause(own: _Failure) -> str:
    """Append this rank's failure to the log, and return a text about the cause.

    The text is empty if this rank itself is the first to fail.
    """
    connection = _connection()
    store = connection.store
    key = _FAILURES.format(connection.comparisons)
    store.append(key, json.dumps(own) + "\n")
    deadline = time.monotonic() + _RECORDS_S
    while True:
        log = [_Failure(*json.loads(line)) for line in store.get(key).decode().splitlines()]
        # The job has recovered from older failures.
        recent = [failure for failure in log if own.time_s - failure.time_s <= RECENT_S]
        first = next((failure for failure in recent if failure.kind == "own"), None)
        # A rank without a recent record may have been killed, which leaves no record.
        silent = sorted({*range(dist.get_world_size())} - {failure.rank for failure in recent})
        if first is not None or not silent or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if first is None and silent:
        it = "one of them" if len(silent) > 1 else "it"
        return (
            f"{name_ranks(silent)} reported no failure; {it} may be the cause, if it was killed, "
            "was stopped, or ended outside the pipeline"
        )
    # A stall on one rank loses the communication of the others.
    stalled = [failure for failure in recent if failure.kind == "stall"]
    cause = first or min(stalled, key=lambda failure: failure.time_s, default=own)
    return "" if cause.rank == own.rank else str(cause)
