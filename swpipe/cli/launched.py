"""The command line on several ranks: rank 0 prints, and all ranks end with the same exit code.

Under torchrun the same command runs on every rank, and only rank 0 prints. A mistake of the user is
often seen by one rank only (for example, a malformed row of its own share), while the other ranks
wait for it in a collective, which Python cannot interrupt. Therefore::

    rank that sees it     puts a verdict (message, exit code) into the job's store; the first counts
    rank 0                prints the message, once, and notes in the store that it did
    every rank            then, when all are ready, ends with the verdict's exit code

A thread on each rank polls for a verdict, and ends the process if the main thread cannot. The
variables that torchrun sets may come from elsewhere, for example from a cluster's container.
Therefore only the commands that several ranks run together join the other ranks, and outside of
torchrun they print that they wait.

Other exceptions are not changed: the rank that raised prints its traceback and ends with exit code
1, without the interpreter's shutdown, in which gloo sometimes aborts (exit code -6): a pending
collective is completed by another rank, and gloo's thread releases the last reference to a tensor.
For that it needs the interpreter lock, and an interpreter that is shutting down ends each thread
that asks for it; inside a C++ destructor, that aborts.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import torch
import torch.distributed as dist
import typer
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from swpipe._distributed.agreement import Facts, differences, plan_facts
from swpipe._distributed.rank_checks import within
from swpipe.cli.options import flag
from swpipe.cli.user_errors import REPORTED, UserError, Verdict, echo, verdict_on
from swpipe.core.messages import one_line, plain, shorten
from swpipe.core.plan import PipelinePlan
from swpipe.device import on_cpu
from swpipe.tasks.workload import MOST_COUNT

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

COMMANDS = ("train", "profile", "plan", "report")
"""The commands that several ranks run together; of ``plan``, all subcommands but ``show``."""

JOIN_S = 300.0  # all ranks must have started within this time
_POLL_S = 0.2  # interval of polling for a verdict
_REPORT_S = 10.0  # rank 0 must have printed a verdict within this time
_FIRST_S = 600.0  # time for what a node's first rank does before the other ranks

_VERDICT = "swpipe/verdict"
_PRINTED = "swpipe/printed"
_READY = "swpipe/ready"
_LEAVE = "swpipe/leave"
_COMMAND = "swpipe/command/{}"


def launched() -> bool:
    """Return whether a launcher such as torchrun started this process as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def joins(args: Sequence[str]) -> bool:
    """Return whether this process has to join other ranks for a command line."""
    if not launched() or "--help" in args or args[0] == "--version":
        return False
    # Under torchrun, ranks join for every command, so that they end together.
    is_ranked = args[0] in COMMANDS and [*args[:2]] != ["plan", "show"]
    return is_ranked or dist.is_torchelastic_launched()


def _number(name: str, most: int, least: int = 0) -> int:
    text = os.environ[name]
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise UserError(
            f"{name}={plain(text)}: torchrun sets an integer from {least} to {most}; correct it, "
            "or unset RANK to run in one process"
        )
    return number


class Rank:
    """This process as one rank of several.

    Attributes:
        number: The rank, from 0.
        size: The number of ranks.
    """

    def __init__(self) -> None:
        self.size = _number("WORLD_SIZE", MOST_COUNT, 1)
        self.number = _number("RANK", self.size - 1)
        port = _number("MASTER_PORT", 2**16 - 1)
        self._local_rank = (
            _number("LOCAL_RANK", self.size - 1) if "LOCAL_RANK" in os.environ else self.number
        )
        here = f"rank {self.number} of {self.size}, at {shorten(os.environ['MASTER_ADDR'])}:{port}"
        if not dist.is_torchelastic_launched():
            echo(
                f"swpipe: RANK is set: {here}: waits at most {JOIN_S:g} s for the others", err=True
            )
        try:
            self._store, *_ = within(JOIN_S, lambda: next(rendezvous("env://")))
        except (RuntimeError, ValueError) as error:
            why = one_line(str(error).partition("\n")[0])
            raise UserError(
                f"{here}: cannot join the others: {why}; start all ranks, or unset RANK to run in "
                "one process"
            ) from error
        self._connection = self._store.clone()  # a connection of its own for the watching thread
        if self._local_rank < torch.accelerator.device_count():
            torch.accelerator.set_device_index(self._local_rank)

    def join(self, device: str) -> str:
        """Form the process group for a kind of device, and return the device of this rank.

        Raises:
            UserError: A single device was named, but every rank takes its own; or this rank has
                none.
        """
        kind = torch.device(device)
        join = partial(
            dist.init_process_group, store=self._store, rank=self.number, world_size=self.size
        )
        if on_cpu(kind):
            join("gloo")
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
        # Tensors on the host are exchanged over gloo, those on the device over its own backend.
        backend = dist.get_default_backend_for_device(kind.type)
        join(f"cpu:gloo,{kind.type}:{backend}")
        return f"{kind.type}:{self._local_rank}"

    def agree(self, facts: Facts) -> None:
        """Check that all ranks were given the same command; each rank has to call this.

        Raises:
            UserError: The ranks were given different commands; raised on all ranks.
        """
        self._store.set(_COMMAND.format(self.number), json.dumps(facts))
        keys = [_COMMAND.format(rank) for rank in range(self.size)]
        self._store.wait(keys, timedelta(seconds=_FIRST_S))
        differing = differences([json.loads(text) for text in self._store.multi_get(keys)])
        if differing:
            raise UserError(
                f"the ranks were given different commands: {differing}. Start all of them with the "
                "same command, and with the same plan files on every node"
            )

    def end(self, verdict: Verdict) -> NoReturn:
        """End this process, and with it the job.

        Args:
            verdict: The verdict of this rank. The first verdict of all ranks counts.
        """
        # ``compare_set`` is atomic in the store: exactly one rank's verdict becomes the first.
        first = self._store.compare_set(_VERDICT, "", json.dumps(verdict))
        self._leave(self._store, Verdict(*json.loads(first)), sys.stderr)

    def fail(self, error: Exception) -> NoReturn:
        """End this process with the traceback of an exception, and exit code 1."""
        get_error_handler().record_exception(error)  # torchrun reports the earliest of all ranks
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # no interpreter shutdown: see the module's docstring

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End the process if another rank leaves a verdict while the block runs."""
        done = threading.Event()
        # The thread keeps the present stderr, since ``sys.stderr`` is redirected later on most
        # ranks.
        stderr = sys.stderr
        watcher = threading.Thread(
            target=self._watch, args=(done, stderr), name="swpipe-verdict", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    # ------------------------------------------------------------------ private

    def _leave(self, store: Store, verdict: Verdict, stderr: TextIO) -> NoReturn:
        line = f"swpipe: {verdict.message}"
        within = timedelta(seconds=_REPORT_S)
        printed = False
        try:
            if self.number == 0:
                print(line, file=stderr, flush=True)
                printed = True
                store.set(_PRINTED, "yes")
            else:
                store.wait([_PRINTED], within)
                printed = True
            # All ranks end together: torchrun kills the ranks that still run after another has
            # failed.
            if store.add(_READY, 1) == self.size:
                store.set(_LEAVE, "yes")
            else:
                store.wait([_LEAVE], within)
        except RuntimeError as gone:  # a rank or the store, which rank 0 may host, has ended
            if not printed:  # as far as known: better twice than never
                print(f"{line} (rank {self.number}, left alone: {gone})", file=stderr, flush=True)
        sys.stdout.flush()
        os._exit(verdict.code)  # do not wait for collectives that never complete

    def _watch(self, done: threading.Event, stderr: TextIO) -> None:
        store = self._connection
        while not done.wait(_POLL_S):
            try:
                if not store.check([_VERDICT]):
                    continue
            except RuntimeError:  # the store has ended, and so has the job
                return
            if not done.wait(2 * _POLL_S):  # give the main thread time to end by itself
                print(file=stderr)  # the line may contain a progress bar
                self._leave(store, Verdict(*json.loads(store.get(_VERDICT))), stderr)


def agree(context: typer.Context, plans: Sequence[PipelinePlan | None]) -> None:
    """Check that all ranks were given the same command, if there are several ranks.

    Args:
        context: The command's context.
        plans: The plans that it runs under; None for a plan that is yet to be made.

    Raises:
        UserError: The ranks were given different commands; raised on all ranks.
    """
    rank: Rank | None = context.obj
    if rank is not None:
        rank.agree(command_facts(context.command_path, context.params, plans))


def command_facts(
    command: str, options: Mapping[str, Any], plans: Sequence[PipelinePlan | None]
) -> dict[str, str]:
    """Return the parts of a command that have to be the same on all ranks.

    Nodes may have files in different places, so the number of files is compared. Files of different
    names may hold the same plan, so the plans themselves are compared.
    """
    facts = {"command": command}
    for name, value in options.items():
        if name not in ("plan", "compare"):
            values = value if isinstance(value, list | tuple) else [value]
            files = sum(isinstance(each, Path) for each in values)
            facts[flag(name)] = f"{files} files" if files else str(value or "none")
    for number, plan in enumerate(plans, start=1):
        of_plan = {"digest": "yet to be made"} if plan is None else plan_facts(plan)
        facts |= {f"plan {number}, {fact}": what for fact, what in of_plan.items()}
    return facts


def run_on_ranks(command: Callable[[Rank], int | None]) -> int:
    """Run a command on this rank, together with the other ranks, and return its exit code.

    If the command raises, this does not return: the process ends.
    """
    rank = Rank()
    # Several ranks share a machine's cores. Also, a sum that is split among threads is rounded
    # differently.
    torch.set_num_threads(1)
    try:
        return _run(rank, command)
    except Exception as error:  # noqa: BLE001 - printed, and the process ends
        rank.fail(error)


def _run(rank: Rank, command: Callable[[Rank], int | None]) -> int:
    code = 0
    try:
        with Path(os.devnull).open("w") as nowhere, rank.watched(), ExitStack() as muted:
            if rank.number:
                muted.enter_context(redirect_stdout(nowhere))
                muted.enter_context(redirect_stderr(nowhere))
            code = command(rank) or 0
            if dist.is_initialized():
                dist.destroy_process_group()
    except REPORTED as error:
        rank.end(verdict_on(error))
    return code
