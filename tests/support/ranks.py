"""Functions of a test run on several ranks: processes of this machine, joined by gloo.

    test                          rank 0            rank 1
    with Ranks(2) as ranks:
      ranks.run(fn, 3)  ───────>  fn(3)  <─ gloo ─>  fn(3)
      [a, b]            <───────  a                  b

Ranks are forked from a server, which has run nothing and holds no group. One group runs many
functions all the same. A function is found by its module and name, and so stands at the top level
of a module; it learns its rank from ``torch.distributed``.

No call outlives its deadline, and no process its ``Ranks``. A group of which some ranks failed and
others did not is not used again, since its ranks may be in the middle of different collectives: the
next ``run`` starts a new one. Where all ranks raise alike, the group lives on.
"""

from __future__ import annotations

import datetime as dt
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from tests.support import garbage
from tests.support.servers import Process

START_S = 120.0
"""Seconds in which all ranks must have imported torch and found each other."""

STOP_S = 20.0
"""Seconds that ranks have to end when they are no longer needed, or to print their stacks."""


WELL_BEFORE_S = 30.0
"""Half of a function's deadline: an immediate error comes earlier on the busiest machine."""


class RankDied(RuntimeError):
    """A rank's process ended in the middle of a function."""


class RanksTimeout(RuntimeError):
    """A function did not end on all ranks by its deadline; the message has all stacks."""


@dataclass(frozen=True)
class _Raised:
    """An exception as data, from which it is rebuilt without a call of ``__init__``."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]
    line: str
    text: str
    when_s: float

    @classmethod
    def of(cls, error: BaseException) -> Self:
        text = "".join(traceback.format_exception(error))
        line = f"{type(error).__name__}: {error}"
        raised = cls(type(error), error.args, dict(vars(error)), line, text, time.monotonic())
        try:
            pickle.loads(pickle.dumps(raised)).rebuild()
        except Exception:  # noqa: BLE001 - whatever a foreign class does when it is pickled
            return cls(RuntimeError, (line,), {}, line, text, raised.when_s)
        return raised

    def rebuild(self) -> BaseException:
        error = self.kind.__new__(self.kind, *self.args)
        vars(error).update(self.state)
        return error


class Ranks:
    """Local ranks that run functions together.

    Args:
        size: The number of ranks.
        deadline_s: Seconds that a function has, where ``run`` is not told otherwise.
        grace_s: Seconds that the other ranks have to come back, too, once one has failed.
    """

    def __init__(self, size: int, *, deadline_s: float = 60.0, grace_s: float = 5.0) -> None:
        self.size = size
        self.deadline_s = deadline_s
        self.grace_s = grace_s
        self.processes: list[Process] = []
        self._pipes: list[Connection[Any, Any]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, deadline_s: float | None = None) -> list[Any]:
        """Return the result of ``fn(*args)`` on each rank.

        Raises:
            BaseException: What the first rank to fail raised, as itself, with notes of its rank and
                traceback, and of how the other ranks fared.
            RankDied: A rank's process ended.
            RanksTimeout: The deadline passed.
        """
        if not self.processes:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((fn, args)))
        name = getattr(fn, "__qualname__", repr(fn))
        return self._gather(name, self.deadline_s if deadline_s is None else deadline_s)

    def stop(self) -> None:
        """End all processes, after a while whatever they are doing."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + STOP_S
        for process in self.processes:
            process.wait(deadline - time.monotonic())
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ------------------------------------------------------------------ private

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        for rank in range(self.size):
            here, there = Pipe()
            job = {"rank": rank, "size": self.size, "folder": self._folder.name}
            self.processes.append(Process("torchrec", __name__, job, [there.fileno()]))
            there.close()
            self._pipes.append(here)
        self._gather("the start of the ranks", START_S)

    def _gather(self, name: str, within_s: float) -> list[Any]:
        """Return the answer of each rank; if any failed, end all of them."""
        deadline = time.monotonic() + within_s
        answers: dict[int, Any] = {}
        failed = False
        try:
            while len(answers) < self.size:
                waiting = [rank for rank in range(self.size) if rank not in answers]
                ready = wait(
                    [self._pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic())
                )
                for rank in (rank for rank in waiting if self._pipes[rank] in ready):
                    answers[rank] = answer = self._receive(rank, name)
                    if isinstance(answer, _Raised | RankDied) and not failed:
                        failed, deadline = True, time.monotonic() + self.grace_s
                if not ready:
                    break
            if failed:
                raise self._failure(answers)
            if len(answers) < self.size:
                raise self._timeout(name, within_s, answers)
        finally:
            alike = {isinstance(answer, _Raised) for answer in answers.values()}
            died = any(isinstance(answer, RankDied) for answer in answers.values())
            if len(answers) < self.size or died or len(alike) > 1:
                self._kill()
        return [answers[rank] for rank in range(self.size)]

    def _receive(self, rank: int, name: str) -> Any:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionError):
            code = self.processes[rank].wait(STOP_S)
            return RankDied(f"rank {rank} died inside {name} (exit code {code})")

    def _failure(self, answers: dict[int, Any]) -> BaseException:
        """Return the first failure; the death of a rank comes before its effects on others."""
        died = [answer for answer in answers.values() if isinstance(answer, RankDied)]
        raised = {rank: a for rank, a in answers.items() if isinstance(a, _Raised)}
        if died:
            error: BaseException = died[0]
        else:
            first = min(raised, key=lambda rank: raised[rank].when_s)
            error = raised[first].rebuild()
            error.add_note(f"on rank {first}:\n{raised.pop(first).text}")
        for rank, other in raised.items():
            error.add_note(f"rank {rank} failed {_after(other, answers)}: {other.line}")
        for rank in set(range(self.size)) - set(answers):
            error.add_note(f"rank {rank} still ran {self.grace_s:g} s later, and was killed")
        return error

    def _timeout(self, name: str, within_s: float, answers: dict[int, Any]) -> RanksTimeout:
        files = [Path(self._folder_name, f"stacks{rank}") for rank in range(self.size)]
        for process in self.processes:
            if process.wait(0.0) is None:
                os.kill(process.pid, signal.SIGUSR1)
        until = time.monotonic() + STOP_S
        while time.monotonic() < until and not all(f.exists() and f.stat().st_size for f in files):
            time.sleep(0.05)  # for signals to arrive; orders nothing
        stacks = "\n".join(
            f"rank {rank}{' (had finished)' if rank in answers else ''}:\n"
            + (file.read_text() if file.exists() else "  (no stacks)")
            for rank, file in enumerate(files)
        )
        late = sorted(set(range(self.size)) - set(answers))
        return RanksTimeout(f"{name} did not end on ranks {late} within {within_s:g} s\n{stacks}")

    @property
    def _folder_name(self) -> str:
        return "" if self._folder is None else self._folder.name

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(STOP_S)
        for pipe in self._pipes:
            pipe.close()
        self.processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _after(other: _Raised, answers: dict[int, Any]) -> str:
    first_s = min(a.when_s for a in answers.values() if isinstance(a, _Raised))
    return f"{other.when_s - first_s:.1f} s later"


def begin(job: dict[str, Any], descriptors: list[int]) -> None:
    """Run functions on this rank, as requested by the test, until it closes the connection."""
    rank, size, folder = job["rank"], job["size"], job["folder"]
    pipe: Connection[Any, Any] = Connection(descriptors[0])
    stacks = os.open(Path(folder, f"stacks{rank}"), os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(1)
    # What torchrun would say.
    os.environ.update(
        RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{size}"
    )
    _answer(pipe, _join, rank, size, folder)
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            break
        _answer(pipe, _call, message)
        garbage.freeze_if_many()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing to save: taking torch down in good order costs a second and more


def _answer(pipe: Connection[Any, Any], fn: Callable[..., Any], *args: Any) -> None:
    try:
        answer = pickle.dumps(fn(*args))
    except BaseException as error:  # noqa: BLE001 - the test's to see
        answer = pickle.dumps(_Raised.of(error))
    pipe.send_bytes(answer)


def _join(rank: int, size: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=dt.timedelta(seconds=START_S),
    )


def _call(message: bytes) -> Any:
    fn, args = pickle.loads(message)
    return fn(*args)
