"""Workers of a feed: processes on this machine, or any processes that share a torch store."""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from torch._C._distributed_c10d import Store

from swpipe.loops.feeding import FeedWorker


class WorkerProcess:
    """A worker process on this machine; made by ``worker_processes``."""

    def __init__(self, work: Callable[[Any, Any], Any], name: str) -> None:
        # A forked child of a process with threads or an initialized accelerator may hang.
        context = get_context("spawn")
        self.name = name
        self._connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, work), name=name, daemon=True)
        self.process.start()
        other.close()  # the child then has the only copy: recv fails when it dies

    def __call__(self, question: bytes) -> bytes:
        """Return the worker's answer; raise ConnectionError if the process has ended."""
        try:
            self._connection.send_bytes(question)
            return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            # The exit code is known only after join().
            self.process.join()
            raise ConnectionError(f"exit code {self.process.exitcode}") from error

    def close(self) -> None:
        """Kill the process and wait for its end."""
        # kill, not terminate: the worker's function may ignore or delay SIGTERM.
        self.process.kill()
        self.process.join()


def worker_processes(work: Callable[[Any, Any], Any], count: int) -> list[WorkerProcess]:
    """Start processes that make samples for ``feed``.

    Args:
        work: ``work(policy, request)`` returns a sample. It is defined at the top level of a
            module, its value can be pickled, and it does not change the policy.
        count: How many processes.

    Raises:
        ValueError: ``count`` is below 1.
        TypeError: ``work`` cannot be sent to a process.
    """
    if count < 1:
        raise ValueError(f"count is {count}: give at least 1 process")
    try:
        pickle.dumps(work)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"{work!r} cannot be sent to a process: {error}; define it at the top level of a module"
        ) from error
    return [WorkerProcess(work, f"process {number}") for number in range(count)]


def _serve(connection: Connection, work: Callable[[Any, Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C and ends this process
    worker = FeedWorker(work)
    while True:
        try:
            question = connection.recv_bytes()
        except EOFError:  # the trainer has ended
            return
        connection.send_bytes(worker(question))


# Stores have no wait for one of several keys, so that both ends poll.
_POLL_S = 0.002
_BEAT_S = 1.0


class StoreWorker:
    """A worker in any process that runs ``serve_store`` with the same store and name.

    Args:
        store: A ``TCPStore`` that all processes have joined, or another store of torch's.
        name: The worker's name; unique in the store.
        lost_after_s: Seconds without a heartbeat after which the worker counts as lost. They also
            limit the time until the worker starts.
    """

    def __init__(self, store: Store, name: str, lost_after_s: float = 60.0) -> None:
        self.name = name
        self._store = store
        self._lost_after_s = lost_after_s
        self._questions = 0
        self._closed = False

    def __call__(self, question: bytes) -> bytes:
        """Return the worker's answer; raise ConnectionError if its heartbeat stops."""
        number = self._questions
        self._questions += 1
        answer = f"{self.name}/answer/{number}"
        alive = f"{self.name}/alive"
        self._store.set(f"{self.name}/question/{number}", question)  # type: ignore[arg-type]
        beat = None
        seen = time.monotonic()
        while not self._store.check([answer]):
            now = self._store.get(alive) if self._store.check([alive]) else None
            # The beat is a counter, not a time: the clocks of two machines may differ.
            if now != beat:
                beat = now
                seen = time.monotonic()
            if self._closed or time.monotonic() - seen > self._lost_after_s:
                raise ConnectionError(f"no sign of life for {self._lost_after_s} s")
            time.sleep(_POLL_S)
        value = self._store.get(answer)
        self._store.delete_key(answer)
        return value

    def close(self) -> None:
        """Signal ``serve_store`` to return."""
        self._closed = True
        self._store.set(f"{self.name}/end", "")


def serve_store(store: Store, name: str, work: Callable[[Any, Any], Any]) -> None:
    """Answer the ``StoreWorker`` of this name by ``work`` until the feed is closed."""
    worker = FeedWorker(work)
    number = 0
    ended = threading.Event()

    # A thread of its own sends the heartbeat, because work() may take longer than lost_after_s.
    def beat() -> None:
        count = 0
        while not ended.wait(_BEAT_S if count else 0):
            count += 1
            store.set(f"{name}/alive", str(count))

    heart = threading.Thread(target=beat, name=f"feed {name}", daemon=True)
    heart.start()
    try:
        while not store.check([f"{name}/end"]):
            question = f"{name}/question/{number}"
            if not store.check([question]):
                time.sleep(_POLL_S)
                continue
            asked = store.get(question)
            # Each key is deleted by its reader, so that the store does not grow.
            store.delete_key(question)
            store.set(f"{name}/answer/{number}", worker(asked))  # type: ignore[arg-type]
            number += 1
    finally:
        ended.set()
        heart.join()
