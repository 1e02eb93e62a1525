"""Jobs of several ranks, of which one stops communicating.

python -m tests._distributed.stall_job FOLDER SIZE:HOW:GROUP ...

    FOLDER   where each rank's standard error goes: ``FOLDER/SIZE:HOW:GROUP/stderr0``, ...
    SIZE     how many ranks
    HOW      what the last rank does at iteration ``AT``; "first" has rank 0, which holds the store,
             do it instead:
             stopped, stopped-first     it is stopped by SIGSTOP
             left                       its process ends, without a word
             uneven, uneven-first       its data ends, and it waits for the others elsewhere
             stopped+catch, ...         the scripts of the others catch ``StallError``
    GROUP    the thread group of the collective; "default" is the caller's thread

Torch is imported once; the ranks of all jobs are forked from that process, run at the same time,
since they wait most of it, and end as scripts end, through the interpreter's shutdown. Prints JSON:
for each job, each rank's exit code, None for one that is stopped, and how many seconds after the
beginning of its collective of iteration ``AT`` it ended, None for one that has not come to that.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.errors import StallError
from tests.support.ports import free_port

AT = 3

STALL_S = 4.0
"""Longer than an iteration takes on a busy machine: only the one that stops may stall."""

DEADLINE_S = 100
"""The time after which all ranks are killed."""

CATCHES = 7
"""The exit status of a script that catches ``StallError``."""


class Rank:
    """The work of one rank."""

    def __init__(self, rank: int, size: int, how: str, folder: Path) -> None:
        self.began = folder / f"began{rank}"
        self.how, _, self.catch = how.partition("+")
        self.victim = rank == (0 if self.how.endswith("-first") else size - 1)
        self.how = self.how.removesuffix("-first")

    def reduce(self, ctx: IterContext) -> None:
        """Run the collective that stalls."""
        if ctx.iter_idx == AT:
            self.began.write_text(str(time.monotonic()))
        if self.victim and ctx.iter_idx == AT and self.how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
            threading.Event().wait()  # the signal may stop another thread first, this one later
        if self.victim and ctx.iter_idx == AT and self.how == "left":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    def run(self, group: str) -> None:
        """Run the whole script."""
        batches = AT if self.victim and self.how == "uneven" else 100
        tasks = [PipelineTask("read", lambda ctx: None), PipelineTask("reduce", self.reduce)]
        plan = PipelinePlan(
            {
                "read": TaskSchedule(stage=0),
                "reduce": TaskSchedule(stage=1, thread_group=group, globally_ordered=True),
            },
            deps=[("reduce", "read")],
        )
        dist.barrier()  # the first collective waits for the last rank to begin
        try:
            with SWPipeline(plan, tasks, device="cpu", stall_timeout_s=STALL_S) as pipe:
                pipe.run(range(batches))
        except StallError:
            if self.catch:
                sys.exit(CATCHES)
            raise
        dist.barrier()


def main() -> None:
    """Fork the ranks of each job, wait for all but those that are stopped, and report."""
    root, jobs = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    gc.freeze()  # else the shutdown of every rank searches all that was imported
    children: dict[int, tuple[str, int]] = {}
    report: dict[str, dict[str, list[float | None]]] = {}
    for job in jobs:
        port = free_port()
        size, how, group = job.split(":")
        report[job] = {"codes": [None] * int(size), "took_s": [None] * int(size)}
        folder = root / job
        folder.mkdir()
        for rank in range(int(size)):
            child = os.fork()
            if child == 0:
                error = os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT)
                os.dup2(error, 2)
                os.environ.update(RANK=str(rank), WORLD_SIZE=size)
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                dist.init_process_group("gloo")
                Rank(rank, int(size), how, folder).run(group)
                return  # to the interpreter's shutdown
            children[child] = (job, rank)
    stopped: set[int] = set()

    def end_all(*_: object) -> None:
        for child in children:
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end_all)
    signal.alarm(DEADLINE_S)
    while len(children) > len(stopped):
        child, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped.add(child)
            continue
        stopped.discard(child)
        job, rank = children.pop(child)
        report[job]["codes"][rank] = os.waitstatus_to_exitcode(status)
        began = root / job / f"began{rank}"
        if began.exists():
            took_s = time.monotonic() - float(began.read_text())
            report[job]["took_s"][rank] = round(took_s, 1)
    for child in stopped:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
