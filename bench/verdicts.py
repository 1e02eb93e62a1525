"""The verdicts of reports on loops with known truth, on a real clock: tasks, loaders, two ranks.

The loops are those of ``tests/reporting/known_loops.py``, and two under DistributedDataParallel.
Tasks compute for a set time by their thread's clock, without the interpreter lock, or sleep.
Loaders are a ``DataLoader`` with workers, or have a thread. The step is timed in a run without a
report, on an idle machine.

The verdict and the first advice must be right for each loop, and at most two intervals may miss the
truth. With two busy processes, "too busy to tell" is right, too.

``python -m bench.verdicts [--busy 2] [LOOP ...]`` measures the named loops, on an idle machine or
with this number of busy processes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain, islice, repeat
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from bench.measure import Row, Spread, sharpen_timers, tolerated
from bench.measure import report as print_rows
from swpipe import IterContext, PipelinePlan, SWPipeline, report, task
from swpipe.reporting import StepReport
from tests.reporting.known_loops import CASES, Case, plan_of, tasks_of
from tests.reporting.loops import Calls

BUSY, BUSY_ROUNDS = 2, 2  # fewer rounds than by default
TOO_BUSY = "too busy to tell"
TIES = (
    *("two kinds of batches", "two tasks that take turns"),
    *("a lock of the user's own", "code that holds the interpreter lock"),
)
"""Loops that wait for their input as long as they compute. On a real clock neither certainly takes
half of a step; therefore "balanced" is right, too."""

SPARE_CORES, CORES = "a decode that has cores to spare", 4
"""The loop whose truth holds only on a machine with this many cores. Others skip it."""

MISSES = 2
"""The number of intervals that may miss the truth: of 24 at 95%, one or two do."""

_APART, _SAVED_APART = 0.01, 0.05  # of a step, of a promise: the time to wake up counts as well
_TRUTH_S, _WARM_UP = 1.5, 5
_READY = 8

STRAGGLER, EVEN = "one of two ranks reads longer", "two even ranks"
_READS_MS = {STRAGGLER: (10, 60), EVEN: (10, 10)}
_TRAINS_MS = 20


# ------------------------------------------------------------------------------------- real time


class RealClock:
    """A clock on which work takes real time: it computes without the GIL, or sleeps."""

    def compute(self, seconds: float) -> None:
        end_s = time.thread_time() + seconds
        while time.thread_time() < end_s:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 400)  # about 0.1 ms

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


CLOCK = RealClock()


class _Sleeps(Dataset[int]):
    """A dataset whose batches take ``seconds`` each."""

    def __init__(self, seconds: float, length: int) -> None:
        self.seconds, self.length = seconds, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> int:
        time.sleep(self.seconds)
        return number


class _InTurn:
    """A loader that makes batches in the call of ``next``, and is not known to be apart."""

    def __init__(self, seconds: float) -> None:
        self.dataset = _Sleeps(seconds, 100_000)

    def __iter__(self) -> Iterator[int]:
        return (self.dataset[number] for number in range(100_000))


class _SlowStart:
    """A loader whose pass starts a thread that makes batches, and takes a while to begin."""

    def __init__(self, seconds: float, starts_s: float, length: int) -> None:
        self.dataset, self.starts_s = _Sleeps(seconds, length), starts_s

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        ready: queue.Queue[int] = queue.Queue(_READY)
        left = threading.Event()

        def make() -> None:
            time.sleep(self.starts_s)
            for number in range(len(self)):
                batch = self.dataset[number]
                while ready.full() and not left.is_set():
                    time.sleep(1e-3)
                if left.is_set():
                    return
                ready.put(batch)

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        try:
            for _ in range(len(self)):
                yield ready.get()
        finally:
            left.set()


def loader_of(case: Case) -> Any:
    """Return the loader of a case, or None if its batches cost nothing."""
    if case.loader is None:
        return None
    kind, ms, *passes = case.loader
    if kind == "calls":
        return Calls(CLOCK, ms, *passes)
    if kind == "in turn":
        return _InTurn(ms / 1e3)
    if passes:
        starts_ms, length = passes
        return _SlowStart(ms / 1e3, starts_ms / 1e3, length)
    workers = 2
    return DataLoader(_Sleeps(workers * ms / 1e3, 100_000), batch_size=None, num_workers=workers)


# ------------------------------------------------------------------------------------- judgement


class Found(NamedTuple):
    """A report's statements on a loop, and the truth.

    Attributes:
        step_ms: The truth, timed without a report.
        said: The verdict and the first advice.
        is_right: Whether both are.
        contains: Whether each interval contains the truth.
    """

    name: str
    step_ms: float
    truth: str
    said: str
    is_right: bool
    contains: bool
    took_s: float

    @property
    def row(self) -> Row:
        apart = Spread.of([0.0]) if self.is_right else None
        return Row(self.name, self.said, self.truth, apart, 1.0)


def judged(case: Case, name: str, step_ms: float, found: StepReport, took_s: float) -> Found:
    """Compare a report on a case with the truth."""
    truth = f"{case.bound}, {step_ms:.1f} ms: {case.first or 'anything'}"
    if found.cannot_tell:
        return Found(name, step_ms, truth, TOO_BUSY, False, True, took_s)
    step = found.profile.step
    bounds = {case.bound, "balanced"} if name in TIES else {case.bound}
    right = found.verdict.bound in bounds and found.next_step.startswith(case.first)
    contains = abs(1e3 * step.value_s - step_ms) <= 1e3 * step.spread_s + _APART * step_ms
    promised = ""
    if found.changes:
        promised = f" ({found.changes[0].advice.saved.text} ms)"
        if case.saves is not None:
            advice = found.changes[0].advice
            off_ms = abs(1e3 * advice.saved_s - case.saves)
            contains &= off_ms <= 1e3 * advice.saved.spread_s + _SAVED_APART * case.saves
    said = f"{found.verdict.bound}, {step.text} ms: {found.next_step[:48]}{promised}"
    return Found(name, step_ms, truth, said, right, contains, took_s)


def in_process(name: str, rounds: int | None) -> Found:
    """Report on a loop of this process."""
    case = CASES[name]
    begin_s = time.monotonic()
    tasks, plan = tasks_of(CLOCK, case.tasks, case.locked), plan_of(case)
    step_ms = case.step if rounds else _timed_ms(case, tasks, plan)  # not measured
    found = report(tasks, range(case.batches), plan=plan, loader=loader_of(case), rounds=rounds)
    return judged(case, name, step_ms, found, time.monotonic() - begin_s)


def _timed_ms(case: Case, tasks: Sequence[Any], plan: PipelinePlan | None) -> float:
    """Return the time of a step without a report; of whole passes, if starting them counts."""
    passes = case.loader is not None and len(case.loader) > 2 and case.loader[0] != "calls"
    # A plan's first and last iterations, and workers that end one by one, count less in a long run.
    least = 12 if plan is None and case.loader is None else 100
    steps = max(least, round(_TRUTH_S / case.step * 1e3))
    steps = -(-steps // case.batches) * case.batches  # in whole passes each batch counts as often
    loader = loader_of(case)
    with SWPipeline(plan or PipelinePlan.serial(tasks), tasks) as pipe:
        if passes:
            pipe.run(range(2))  # the first iterations allocate
            return 1e3 * pipe.run(loader).seconds / len(loader)
        batches = chain.from_iterable(repeat(range(case.batches) if loader is None else loader))
        pipe.run(islice(batches, _READY + _WARM_UP))
        return 1e3 * pipe.run(islice(batches, steps)).seconds / steps


def _on_rank(name: str, rounds: int | None) -> tuple[StepReport, float]:
    """Report on this rank of two; train includes DDP's all-reduce."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch, reads_s = torch.randn(4, 16), _READS_MS[name][rank] / 1e3

    @task(pure=True)
    def read(ctx: IterContext) -> None:
        time.sleep(reads_s)
        ctx.x = ctx.batch

    @task
    def train(ctx: IterContext) -> None:
        ctx.loss = model(ctx.x).square().mean()
        optimizer.zero_grad()
        ctx.loss.backward()
        optimizer.step()
        CLOCK.compute(_TRAINS_MS / 1e3)

    tasks, steps = [read, train], round(_TRUTH_S / 0.06)
    with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
        pipe.run([batch] * _WARM_UP)
        step_ms = 1e3 * pipe.run([batch] * steps).seconds / steps
    return report(tasks, [batch] * 3, rounds=rounds), step_ms


def on_two_ranks(name: str, rounds: int | None) -> Found:
    """Report on a loop of two ranks, where the truth includes which rank waits for which."""
    from tests.support.ranks import Ranks

    begin_s = time.monotonic()
    with Ranks(2, deadline_s=300.0) as ranks:
        found, step_ms = ranks.run(_on_rank, name, rounds)[0]
    reads_ms = max(_READS_MS[name])
    bound = "input-bound" if reads_ms > _TRAINS_MS else "compute-bound"
    # With so many threads the reads of later iterations are hidden by training.
    threads = ceil(reads_ms / _TRAINS_MS)
    advice = "Run read on " + ("a thread" if threads == 1 else f"{threads} threads")
    case = Case({}, None, step_ms, bound, f"{advice} of its own", saves=reads_ms)
    judgement = judged(case, name, step_ms, found, time.monotonic() - begin_s)
    waits = "Rank 0 waits" in found.verdict.why and "for rank 1" in found.verdict.why
    return judgement._replace(is_right=judgement.is_right and waits == (name == STRAGGLER))


# ----------------------------------------------------------------------------------------- table

_SPINNER = """
import os, sys
while True:
    for _ in range(10**6):
        pass
    os.kill(int(sys.argv[1]), 0)
"""
"""A script that ends when the process with the given number has ended."""


@contextmanager
def beside(busy: int) -> Iterator[None]:
    """Keep cores busy with other processes within the block.

    The processes are orphans, since child processes would count as this process's own load.
    """
    start = f"'{sys.executable}' -c '{_SPINNER}' {os.getpid()} >/dev/null 2>&1 & echo $!"
    pids = [int(subprocess.check_output(["sh", "-c", start])) for _ in range(busy)]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def measured(names: Iterable[str] = (), busy: int = 0) -> list[Found]:
    """Report on the named loops, or on all, and print a line of progress for each."""
    found = []
    with beside(busy):
        left_out = {SPARE_CORES} if len(os.sched_getaffinity(0)) < CORES else set()
        here = [name for name in CASES if name not in left_out]
        for name in [*names] or [*here, STRAGGLER, EVEN]:
            rounds = BUSY_ROUNDS if busy else None
            one = (in_process if name in CASES else on_two_ranks)(name, rounds)
            if busy and one.said == TOO_BUSY:
                one = one._replace(is_right=True)
            mark = "right" if one.is_right else "WRONG"
            print(
                f"{mark}, {one.took_s:.0f} s, {name}: {one.truth} | {one.said}"
                f"{'' if one.contains else ' | the interval misses the truth'}",
                file=sys.stderr,
                flush=True,
            )
            found.append(one)
    return found


def rows_of(found: Sequence[Found], where: str) -> list[Row]:
    """Return a row per loop, and one on the intervals."""
    missed = sum(not one.contains for one in found)
    what = f"intervals that miss the truth, {where}"
    return [*(one.row for one in found), tolerated(what, missed, MISSES, "")]


def rows() -> list[Row]:
    """Return the rows of all loops on an idle machine, and with busy processes."""
    alone = rows_of(measured(), "idle")
    return alone + rows_of(measured(busy=BUSY), f"beside {BUSY} busy processes")


def main(arguments: Sequence[str] = ()) -> int:
    """Measure the named loops; return 1 if any verdict is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.verdicts", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="LOOP")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy processes beside")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sharpen_timers()
    return print_rows(rows_of(measured(options.names, options.busy), f"{options.busy} busy"))


if __name__ == "__main__":
    # Ranks find this module's functions by its name, which is not that of a script.
    sys.exit(import_module("bench.verdicts").main(sys.argv[1:]))
