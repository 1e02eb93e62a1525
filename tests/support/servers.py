"""Servers from which the scripts and ranks of tests are forked; one of each kind for all workers.

    test, in any worker      server                          process
    Process(job) ── job ──>  has imported torch, or more
                             fork  ─────────────────────>    the job
                 <── pid, code ─  waits; kills it where the test has hung up

To import torch takes seconds, TorchRec some more: a machine does that once, when the first test
asks. The kinds beyond the first are forked from it. Servers end with the process that began them.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import garbage

ROOT = Path(__file__).parents[2]

IMPORTED = {
    # The first optimizer of a process imports the second for a second.
    "torch": ("torch.distributed", "torch._dynamo", "swpipe"),
    "lightning": ("lightning",),
    "torchrec": (
        "hypothesis",
        "pytest",
        "torchrec.distributed.train_pipeline",
        "swpipe.tasks.torchrec.pipelines.drop_in",
    ),
}
"""The modules that processes find imported, by kind of server; all find the first kind's."""

_PID_BYTES = 4

_FOLDER = "SWPIPE_TESTS_SERVERS"
"""The variable that names the folder of the servers' sockets and their checkout."""


def folder() -> Path:
    """Return the folder of the servers' sockets, and start the servers unless a parent did."""
    made, _, of = os.environ.get(_FOLDER, "").partition(" ")
    if of != str(ROOT):
        made = tempfile.mkdtemp(prefix="servers-")
        os.environ[_FOLDER] = f"{made} {ROOT}"
        listeners = [_listener(f"{made}/{kind}") for kind in IMPORTED]
        numbers = [listener.fileno() for listener in listeners]
        with Path(made, "log").open("wb") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, numbers)],
                cwd=ROOT,
                # As the tests: cores are shared by them all, and idle helpers of torch's are busy.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=numbers,
                start_new_session=True,  # Ctrl-C is for the tests
            )
        for listener in listeners:
            listener.close()
        atexit.register(_end, server, os.getpid(), made)
    return Path(made)


def _listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    return listener


def _end(server: subprocess.Popen[bytes], began: int, made: str) -> None:
    if os.getpid() == began:
        server.kill()
        server.wait()
        shutil.rmtree(made)


class Process:
    """A job in a process of its own, which is killed when this one ends.

    Args:
        kind: The server to fork it from.
        module: Its ``begin`` is called there, with the job and the descriptors.
        job: Data for JSON.
        descriptors: The descriptors of files that the process gets, too.
    """

    def __init__(
        self, kind: str, module: str, job: dict[str, Any], descriptors: Sequence[int]
    ) -> None:
        self._code: int | None = None
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(folder() / kind))
        said = json.dumps((module, job)).encode() + b"\n"
        sent = socket.send_fds(self._server, [said], descriptors)
        if sent < len(said):  # else the process may have ended: to send nothing is an error then
            self._server.sendall(said[sent:])
        self.pid = int.from_bytes(self._received(_PID_BYTES), "big")
        """The number of the process, which has begun by now."""

    def wait(self, within_s: float) -> int | None:
        """Return the exit code, as ``subprocess`` does; None if the process has not ended."""
        if self._code is None and select.select([self._server], [], [], max(0.0, within_s))[0]:
            self._code = int(self._received(64))
            self._server.close()
        return self._code

    def _received(self, most: int) -> bytes:
        said = self._server.recv(most)
        if not said:
            log = (folder() / "log").read_text("utf-8", "replace")
            raise RuntimeError(f"the server of the tests' processes has ended:\n{log}")
        return said

    def kill(self) -> None:
        """Kill the process."""
        if self._code is None:
            self._server.shutdown(socket.SHUT_WR)


# ------------------------------------------------------------------------------ the server


class _Running(NamedTuple):
    """A process, with a descriptor that shows its end, and the socket of its test."""

    process: int
    ended: int
    test: socket.socket

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.ended)
        self.test.close()


class Server:
    """A server that forks a process for each job.

    Args:
        descriptors: The listening sockets by kind; the first kind is this server's own.
    """

    def __init__(self, descriptors: Sequence[str]) -> None:
        self._owner = os.pidfd_open(os.getppid())
        self._listeners = {
            kind: socket.socket(fileno=int(number))
            for kind, number in zip(IMPORTED, descriptors, strict=True)
        }
        self._kind = next(iter(IMPORTED))
        self._has_imported = False
        self._running: list[_Running] = []

    def serve(self) -> tuple[str, dict[str, Any], list[int]]:
        """Serve; return in each forked process, with its module, job and descriptors."""
        while True:
            of_jobs = [source for one in self._running for source in (one.ended, one.test)]
            sources = [self._owner, *self._listeners.values(), *of_jobs]
            ready = select.select(sources, [], [])[0]
            self._end_jobs(ready)
            if self._owner in ready:
                os._exit(0)
            if not self._has_imported:
                import_all(self._kind)
                self._has_imported = True
            for kind in [kind for kind, one in self._listeners.items() if one in ready]:
                if kind != self._kind:
                    self._begin_server(kind)
                    break  # this may be that server now
                if job := self._begin_job():
                    return job

    def _end_jobs(self, ready: list[Any]) -> None:
        """Report how jobs ended, and kill those of tests that have closed their connection."""
        for one in [one for one in self._running if one.ended in ready]:
            code = os.waitstatus_to_exitcode(os.waitpid(one.process, 0)[1])
            with suppress(OSError):  # the test has hung up
                one.test.sendall(str(code).encode())
            self._running.remove(one)
            one.close()
        for one in self._running:
            if one.test in ready or self._owner in ready:
                os.kill(one.process, signal.SIGKILL)

    def _begin_job(self) -> tuple[str, dict[str, Any], list[int]] | None:
        test, _ = self._listeners[self._kind].accept()
        said, descriptors, _, _ = socket.recv_fds(test, 1 << 16, 8)
        while not said.endswith(b"\n"):
            said += test.recv(1 << 16)
        process = os.fork()
        if process == 0:
            test.close()
            os.close(self._owner)
            self._forget({*self._listeners})
            module, job = json.loads(said)
            return module, job, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(OSError):
            test.sendall(process.to_bytes(_PID_BYTES, "big"))
        self._running.append(_Running(process, os.pidfd_open(process), test))
        return None

    def _begin_server(self, kind: str) -> None:
        """Fork a server of this kind."""
        if os.fork() == 0:
            self._forget({*self._listeners} - {kind})
            self._kind, self._has_imported = kind, False
        else:
            self._listeners.pop(kind).close()

    def _forget(self, kinds: set[str]) -> None:
        """Close, in a fork, the other servers' descriptors."""
        for kind in kinds:
            self._listeners.pop(kind).close()
        for one in self._running:
            one.close()
        self._running = []


def import_all(kind: str) -> None:
    """Import the modules of this kind of process."""
    for name in IMPORTED[kind]:
        with suppress(ImportError, AttributeError):  # what is not installed
            module = import_module(name)
            for public in getattr(module, "__all__", ()):  # some are loaded when first asked for
                getattr(module, public)
    garbage.freeze()  # else the shutdown of every process searches all that was imported


if __name__ == "__main__":
    name, given, files = Server(sys.argv[1:]).serve()
    import_module(name).begin(given, files)
