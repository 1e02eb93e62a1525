"""``python -m tests.peer CHECKOUT [PATTERN]``: run the cases that contain PATTERN, print a table.

Each case runs in a process of its own, forked from one that has imported everything.
"""

from __future__ import annotations

import argparse
import os
import pickle
import select
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from tests.peer import outcome as kinds
from tests.peer.cases import Case, cases_of
from tests.peer.cpu import report_use, test_modules
from tests.peer.outcome import Outcome, told


def main() -> int:
    """Run; the exit status is 1 if a case failed or hung."""
    parser = argparse.ArgumentParser(prog="python -m tests.peer", description=__doc__)
    parser.add_argument("checkout", type=Path, help="the root of a checkout of TorchRec")
    parser.add_argument("pattern", nargs="?", default="", help="only cases that contain this")
    parser.add_argument("--torchrec", action="store_true", help="on TorchRec's own pipelines")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each case")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    modules = test_modules(options.checkout, on_ours=not options.torchrec)
    cases = [case for case in cases_of(modules) if options.pattern in str(case)]
    counts: Counter[str] = Counter()
    for case in cases:
        found = _in_process(case, options.timeout)
        if found is None:
            continue
        counts[found.kind] += 1
        if found.kind != kinds.OTHER:
            print(f"{found.kind:36} {case}{found.why and f'  [{found.why[:200]}]'}", flush=True)
            if options.verbose and found.text:
                print(found.text)
    ours = sum(counts.values()) - counts[kinds.OTHER]
    print(f"\n{ours} cases of pipelines that swpipe replaces:")
    for kind in kinds.KINDS:
        print(f"  {counts[kind]:4}  {kind}")
    return 1 if counts[kinds.FAILED] + counts[kinds.HUNG] else 0


def _in_process(case: Case, timeout_s: float) -> Outcome | None:
    used_read, used_write = os.pipe()
    result_read, result_write = os.pipe()
    child = os.fork()
    if child == 0:
        _run(case, used_write, result_write)
    for descriptor in (used_write, result_write):
        os.close(descriptor)
    deadline = time.monotonic() + timeout_s
    data = b""
    while select.select([result_read], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(result_read, 1 << 16)
        if not chunk:
            break
        data += chunk
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.set_blocking(used_read, False)
    try:
        used = os.read(used_read, 1 << 16)
    except BlockingIOError:
        used = b""
    for descriptor in (used_read, result_read):
        os.close(descriptor)
    return _outcome(data, used, timeout_s)


def _outcome(data: bytes, used: bytes, timeout_s: float) -> Outcome | None:
    if data:
        return told(pickle.loads(data), used)
    if not used:
        return Outcome(kinds.NEEDS_GPU, "the process ended before a pipeline was made")
    return Outcome(kinds.HUNG, f"no result within {timeout_s:g} s, or the process died")


def _run(case: Case, used: int, result: int) -> None:
    """In the forked process."""
    os.setpgid(0, 0)
    report_use(used)
    quiet = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(quiet, descriptor)
    done = case.run()
    for listed in (done.errors, done.failures, done.skipped):
        listed[:] = [(None, text) for _, text in listed]
    done._original_stdout = done._original_stderr = None  # not pickled
    with os.fdopen(result, "wb") as file:
        file.write(pickle.dumps(done))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
