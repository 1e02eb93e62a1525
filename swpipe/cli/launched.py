"""The command line on several ranks: it speaks with rank 0's voice, and all ranks end alike.

Under torchrun the same command runs on every rank. Rank 0 prints; what the others print goes
nowhere. When the user got something wrong, often only one rank sees it (a malformed row of its own
share) while the others wait for it in a collective, from which no Python gets them out. Hence::

    rank that sees it     leaves its verdict (message, exit code) in the job's store; the first
                          one counts
    rank 0                prints the message, once, and says so in the store
    every rank            when that was said and all are ready, ends with the verdict's exit code

A thread on each rank looks out for a verdict, and ends the process where the main thread cannot.
All other exceptions take their own way: the rank that raised tells its traceback and ends with exit
code 1, torchrun ends the job, and other ranks' errors name the first one
(``swpipe._distributed.rank_checks``).

A rank that fails does not go through the interpreter's end, where gloo would abort it now and then
(exit code -6, after the traceback). A collective is still pending, another rank answers it, and
gloo's thread lets go of a tensor that Python has let go of before. For that it asks for the
interpreter, which ends by now every thread that asks; and to end a thread inside a C++ destructor
is to abort.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from swpipe._distributed.agreement import Facts, differences, plan_facts
from swpipe.cli.user_errors import ClickError, UserError
from swpipe.core.plan import PipelinePlan
from swpipe.device import on_cpu

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from swpipe.tasks.clicks import ClickConfig

T = TypeVar("T")

_LOOK_S = 0.2  # between two looks for a verdict
_TELL_S = 10.0  # that other ranks have to hear of it
_AFTER_S = 2.0  # from one rank's failure to the end of those that fail after it
_FIRST_S = 600.0  # that a node's first rank has for what it does ahead of the others

_VERDICT, _TOLD = "swpipe/verdict", "swpipe/told"
_READY, _LEAVE = "swpipe/ready", "swpipe/leave"
_HELD, _FAILED = "swpipe/held/{}", "swpipe/failed"

_ALIKE = (
    *("steps", "serially", "batches", "rounds", "batch_size", "device", "seed", "strict"),
    *("workload", "in_flight", "threads", "frozen"),
)
_ALIKE_IN_NUMBER = ("data", "held_out")  # nodes may have them in different places
_ALIKE_IF_GIVEN = ("costs",)


def launched() -> bool:
    """Whether torchrun, or something that says the same, started this process as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


class Verdict(NamedTuple):
    """How the job ends.

    Attributes:
        message: One line.
        code: The exit code.
    """

    message: str
    code: int


class RankedJob:
    """This process as one rank of several.

    Attributes:
        rank: Among all.
        size: How many there are.
    """

    def __init__(self) -> None:
        self._store, self.rank, self.size = next(rendezvous("env://"))
        # For other threads, and for failures: once the store is gone, to open one takes minutes.
        self._line = self._store.clone()
        self._local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        if self._local_rank < torch.accelerator.device_count():
            torch.accelerator.set_device_index(self._local_rank)

    def first(self, fn: Callable[[], T]) -> T:
        """Call ``fn`` on each node's first rank, and then on the others."""
        key = f"swpipe/first/{os.environ.get('GROUP_RANK', '0')}"
        if self._local_rank:
            self._store.wait([key], timedelta(seconds=_FIRST_S))
            return fn()
        result = fn()
        self._store.set(key, "done")
        return result

    def join(self, device: str) -> str:
        """Form the process group for a kind of device; the device of this rank.

        Raises:
            UserError: Every rank takes a device of its own, and one was named, or there is none.
        """
        kind = torch.device(device)
        if on_cpu(kind):
            dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=self.size)
            return device
        if ":" in device:
            raise UserError(
                f"--device {device}: each rank takes a device of its own; say --device {kind.type}"
            )
        if self._local_rank >= torch.accelerator.device_count():
            raise UserError(
                f"--device {device}: local rank {self._local_rank} has none of its own, there are "
                f"{torch.accelerator.device_count()}; start as many ranks as there are devices"
            )
        backend = dist.get_default_backend_for_device(kind.type)
        dist.init_process_group(
            f"cpu:gloo,{kind.type}:{backend}",
            store=self._store,
            rank=self.rank,
            world_size=self.size,
        )
        return f"{kind.type}:{self._local_rank}"

    def agree(self, facts: Facts) -> None:
        """Make sure that all ranks were told the same; each has to call this.

        Raises:
            UserError: They were not; raised on all of them.
        """
        self._store.set(_HELD.format(self.rank), json.dumps(facts))
        keys = [_HELD.format(rank) for rank in range(self.size)]
        self._store.wait(keys, timedelta(seconds=_FIRST_S))
        differing = differences([json.loads(held) for held in self._store.multi_get(keys)])
        if differing:
            raise UserError(
                f"the ranks were told different things: {differing}. Start all of them with the "
                "same command, and with the same plan files on every node"
            )

    def end(self, verdict: Verdict) -> NoReturn:
        """End this process, and with it the job.

        Args:
            verdict: This rank's. Where another rank's was first, that one counts.
        """
        held = self._store.compare_set(_VERDICT, "", json.dumps(verdict))
        self._leave(self._store, Verdict(*json.loads(held)), sys.stderr)

    def fail(self) -> NoReturn:
        """End this process with the traceback of the exception being handled, and exit code 1.

        Where another rank has failed before, that one ends first: torchrun looks at them in turns,
        and calls the first one that it finds ended the root cause.
        """
        try:
            later = self._line.add(_FAILED, 1) > 1
        except RuntimeError:  # the store is gone, and with it the job
            later = False
        sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        if later:
            time.sleep(_AFTER_S)
        os._exit(1)  # see above

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block, end the process when another rank has left a verdict."""
        done = threading.Event()
        voice = sys.stderr
        watcher = threading.Thread(
            target=self._watch, args=(done, voice), name="swpipe-verdict", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    # ------------------------------------------------------------------ private

    def _leave(self, store: Store, verdict: Verdict, voice: TextIO) -> NoReturn:
        said = f"swpipe: {verdict.message}"
        within = timedelta(seconds=_TELL_S)
        try:
            if self.rank == 0:
                print(said, file=voice, flush=True)
                store.set(_TOLD, "yes")
            else:
                store.wait([_TOLD], within)
            # Together: torchrun ends with a signal whom it finds running after another has failed.
            if store.add(_READY, 1) == self.size:
                store.set(_LEAVE, "yes")
            else:
                store.wait([_LEAVE], within)
        except RuntimeError as gone:  # some rank, or the store: better told twice than not at all
            print(f"{said} (rank {self.rank}, left alone: {gone})", file=voice, flush=True)
        sys.stdout.flush()
        os._exit(verdict.code)  # not through what waits for collectives that will not come

    def _watch(self, done: threading.Event, voice: TextIO) -> None:
        store = self._line
        while not done.wait(_LOOK_S):
            try:
                if not store.check([_VERDICT]):
                    continue
            except RuntimeError:  # the store is gone, and with it whoever could leave a verdict
                return
            if not done.wait(2 * _LOOK_S):  # the main thread may be about to end by itself
                print(file=voice)  # a progress bar may stand there
                self._leave(store, Verdict(*json.loads(store.get(_VERDICT))), voice)


def on_all(job: RankedJob, make: Callable[[], ClickConfig]) -> ClickConfig:
    """What to train on what, on this rank's device; each node's first rank makes what is missing.

    Raises:
        UserError: As ``RankedJob.join``.
    """
    config = job.first(make)
    return replace(config, device=job.join(config.device))


def written(job: RankedJob | None, path: Path | None) -> Path | None:
    """A file that the user wants, on the rank that writes it; None on all others."""
    return path if job is None or job.rank == 0 else None


def facts_of(
    command: str, options: Mapping[str, Any], plans: Collection[PipelinePlan | None]
) -> dict[str, str]:
    """What a command was told, as far as all ranks have to be told the same.

    Args:
        command: Its name.
        options: Parameter to value.
        plans: Those that it runs under; files of different names may hold the same plan. None for
            one that is yet to be made.
    """
    facts = {"command": command}
    facts |= {_option(name): str(options[name]) for name in _ALIKE if name in options}
    for name in _ALIKE_IN_NUMBER:
        facts[_option(name)] = f"{len(options.get(name) or ())} files"
    for name in _ALIKE_IF_GIVEN:
        facts[_option(name)] = "a file" if options.get(name) else "none"
    facts["plans"] = str(len(plans))
    for number, plan in enumerate(plans, start=1):
        told = {"digest": "yet to be made"} if plan is None else plan_facts(plan)
        facts |= {f"plan {number}, {fact}": what for fact, what in told.items()}
    return facts


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run_on_ranks(command: Callable[[RankedJob], int | None]) -> int:
    """Run a command on this rank, together with the others; its exit code.

    Does not return where the command raises: the process ends.
    """
    job = RankedJob()
    # Several ranks share a machine's cores; and a sum that is split among threads rounds otherwise.
    torch.set_num_threads(1)
    try:
        return _run(job, command)
    except Exception:  # noqa: BLE001 - told, and the end
        job.fail()


def _run(job: RankedJob, command: Callable[[RankedJob], int | None]) -> int:
    verdict, code = None, 0
    with Path(os.devnull).open("w") as nowhere, job.watched():
        try:
            with _muted(nowhere if job.rank else None):
                code = command(job) or 0
            if dist.is_initialized():
                dist.destroy_process_group()
        except ClickError as error:
            verdict = Verdict(error.format_message(), error.exit_code)
    if verdict is not None:
        job.end(verdict)
    return code


@contextmanager
def _muted(nowhere: Any) -> Iterator[None]:
    if nowhere is None:
        yield
        return
    with redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
