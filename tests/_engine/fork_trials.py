"""python -m tests._engine.fork_trials: forks of a process that drives a pipeline, in each way.

    refused   calls in the child are refused, close() returns, a new pipeline works; os._exit
    exit      the child leaves the pipeline open, and ends by sys.exit
    inside    the child is forked by a task, and leaves progress() by SystemExit
    process   the calls of ``refused`` in a multiprocessing.Process
    loader    a DataLoader starts its worker processes while another one's are at work

After each the parent goes on. Prints "done" at the end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader

from swpipe import SWPipeline
from tests.support.plans_for_tests import piped, spread, tasks

CHILD_S = 30
"""The time after which SIGALRM ends a child that hangs."""

ALL = list(range(9))


def is_refused(call: Callable[[], object]) -> bool:
    """Return whether the call raises an error about the fork."""
    try:
        call()
    except RuntimeError as error:
        return "this process was forked from the one that made it" in str(error)
    return False


def refused(pipe: SWPipeline) -> None:
    """Use the parent's pipeline, close it, and make another one; exit with code 9 on a fault."""
    signal.alarm(CHILD_S)
    data = iter(ALL)
    calls: list[Callable[[], object]] = [
        lambda: pipe.progress(data),
        lambda: pipe.fill_pipeline(data),
        lambda: pipe.run_one_serial_iter(0),
        pipe.drain,
    ]
    ok = pipe.closed and all(is_refused(call) for call in calls)
    pipe.close()
    pipe.close()
    with SWPipeline(spread(), tasks(), device="cpu") as own:
        ok = ok and [ctx.batch for ctx in own.iterate(ALL)] == ALL
    os._exit(0 if ok else 9)


def exit_code(child: Callable[[], None]) -> int:
    """Return the exit code of a child process that calls ``child``."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_S)
        child()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forks(how: str) -> None:
    """Fork a child by ``os.fork`` or ``multiprocessing`` while a pipeline runs."""
    codes: list[int] = []

    def inside() -> None:
        if how == "inside":
            codes.append(exit_code(lambda: None))

    forward = {"forward": lambda ctx: inside() if ctx.batch == 2 else None}
    with SWPipeline(spread(), tasks(**forward), device="cpu") as pipe:
        data = iter(ALL)
        pipe.fill_pipeline(data)
        if how == "process":
            process = multiprocessing.get_context("fork").Process(target=refused, args=(pipe,))
            process.start()
            process.join()
            codes.append(process.exitcode or 0)
        elif how != "inside":
            codes.append(exit_code((lambda: refused(pipe)) if how == "refused" else lambda: None))
        try:
            assert [ctx.batch for ctx in pipe.iterate(data)] == ALL
        except SystemExit as error:  # of the child that was forked inside
            os._exit(9 if "is still inside" in "".join(error.__notes__) else 0)
    assert codes == [0], codes


def loads() -> None:
    """Iterate over a loader with worker processes, inside a loop over the same loader."""
    loader = DataLoader(ALL, batch_size=None, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
    with SWPipeline(piped(), tasks(), device="cpu") as pipe:
        for ctx in pipe.iterate(loader):
            if ctx.batch == 3:
                assert [int(batch) for batch in loader] == ALL


def main() -> None:
    """Run all kinds of forks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks while there are threads
    for how in ("refused", "exit", "inside", "process"):
        forks(how)
    loads()
    print("done")


if __name__ == "__main__":
    main()
