"""The command line on several ranks: all run one command, and rank 0 prints the results.

Under torchrun the same command runs on every rank. Before a job is opened, the ranks compare their
commands and plans through the job's store, and none goes on alone. A mistake of the user is one
line from each rank that has it, and the launcher ends the other ranks.

The variables that torchrun sets may come from elsewhere, for example from a cluster's container.
Therefore only the commands that several ranks run together join the other ranks, and outside of
torchrun they print that they wait.

A rank that fails ends without the interpreter's shutdown, in which gloo sometimes aborts (exit code
-6): a pending collective is completed by another rank, and gloo's thread releases the last
reference to a tensor. For that it needs the interpreter lock, and an interpreter that is shutting
down ends each thread that asks for it; inside a C++ destructor, that aborts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from swpipe._distributed.agreement import Facts, differences, plan_facts
from swpipe._distributed.rank_checks import answers_of_ranks, within
from swpipe.cli.options import MOST_COUNT, flag
from swpipe.cli.user_errors import UserError, echo, exit_code
from swpipe.core.messages import one_line, plain, shorten
from swpipe.core.plan import PipelinePlan
from swpipe.device import on_cpu, resolve

COMMANDS = ("train", "profile", "plan", "report")
"""The commands that several ranks run together; of ``plan``, all subcommands but ``show``."""

JOIN_S = 300.0  # all ranks must have started within this time
_READ_S = 5.0  # time for all ranks to read what differs
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
        here = f"{self}, at {shorten(os.environ['MASTER_ADDR'])}:{port}"
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
        if self._local_rank < torch.accelerator.device_count():
            torch.accelerator.set_device_index(self._local_rank)

    def __str__(self) -> str:
        return f"rank {self.number} of {self.size}"

    def join(self, device: str | None) -> str:
        """Form the process group for a kind of device, and return the device of this rank.

        Args:
            device: The device in torch's words; None for the machine's accelerator, or the CPU.

        Raises:
            UserError: A single device was named, but every rank takes its own; or this rank has
                none.
        """
        device = device or resolve(None).type
        kind = torch.device(device)
        join = partial(
            dist.init_process_group, store=self._store, rank=self.number, world_size=self.size
        )
        if on_cpu(kind):
            join("gloo")
            return device
        if ":" in device:
            raise UserError(
                f"--device {device}: each rank takes a device of its own; give --device {kind.type}"
            )
        if self._local_rank >= torch.accelerator.device_count():
            raise UserError(
                f"--device {device}: local rank {self._local_rank} has no device of its own, since "
                f"this machine has {torch.accelerator.device_count()}; start as many ranks as it "
                "has devices"
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
        keys = [_COMMAND.format(rank) for rank in range(self.size)]
        self._store.set(keys[self.number], json.dumps(facts))
        advice = "see the errors of the other ranks, and start all with the same command"
        try:
            answers = answers_of_ranks(self._store, keys, JOIN_S, "began no command", advice)
        except RuntimeError as error:
            raise UserError(one_line(str(error))) from error
        differing = differences(list(map(json.loads, answers)))
        if differing:
            # If this rank holds the store, it may end only when the others have read it, too.
            read = [f"{key}/read" for key in keys]
            with suppress(RuntimeError):
                self._store.set(read[self.number], "")
                answers_of_ranks(self._store, read, _READ_S, "did not read", "end")
            raise UserError(
                f"the ranks were given different commands: {differing}. Start all of them with the "
                "same command, and with the same plan files on every node"
            )


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

    If the command fails, this does not return: the process ends.
    """
    rank = Rank()
    # Several ranks share a machine's cores. Also, a sum that is split among threads is rounded
    # differently.
    torch.set_num_threads(1)
    code = 1
    try:
        code = exit_code(lambda: _run(rank, command), f"swpipe: {rank}")
    except Exception as error:  # noqa: BLE001 - printed, and the process ends
        get_error_handler().record_exception(error)  # torchrun reports the earliest of all ranks
        sys.excepthook(type(error), error, error.__traceback__)
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no interpreter shutdown: see the module's docstring
    return code


def _run(rank: Rank, command: Callable[[Rank], int | None]) -> int | None:
    with Path(os.devnull).open("w") as nowhere, ExitStack() as muted:
        if rank.number:
            muted.enter_context(redirect_stdout(nowhere))
            muted.enter_context(redirect_stderr(nowhere))
        code = command(rank)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code
