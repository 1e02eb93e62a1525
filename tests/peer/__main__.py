"""Run TorchRec's tests of its pipelines on swpipe's, and print the outcome of each case.

Each case runs in a process of its own, forked from one that has imported everything. A case that
fails runs again on TorchRec's own pipelines.
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
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.peer import outcome as kinds
from tests.peer.cases import Case, cases_of
from tests.peer.cpu import forget_tests, load_tests, report_use
from tests.peer.outcome import Outcome, told


def main() -> int:
    """Run the cases; return 1 if one failed or hung, none was found, or a module is missing."""
    parser = argparse.ArgumentParser(prog="python -m tests.peer", description=__doc__)
    parser.add_argument("checkout", type=Path, help="the root of a checkout of TorchRec")
    parser.add_argument("pattern", nargs="?", default="", help="only cases that contain this")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each case")
    parser.add_argument("--verbose", action="store_true", help="every case, with tracebacks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    modules, _ = load_tests(options.checkout, on_ours=False)
    theirs = {str(case): case for case in cases_of(modules)}
    forget_tests()
    modules, missing = load_tests(options.checkout, on_ours=True)
    cases = cases_of(modules)
    counts: Counter[str] = Counter()
    done: set[tuple[Any, ...]] = set()
    same = 0
    for case in (case for case in cases if case.about_ours and options.pattern in str(case)):
        if case.distinct in done:
            same += 1
            continue
        found = _outcome(case, options.timeout)
        if found is None:
            continue
        done.add(case.distinct)
        if found.kind == kinds.FAILED and case.is_private(found.why):
            found = replace(found, kind=kinds.REFUSED, why=f"private to TorchRec: {found.why}")
        elif found.kind == kinds.FAILED:
            found = _compared(found, _outcome(theirs[str(case)], options.timeout, on_ours=False))
        counts[found.kind] += 1
        _print(case, found, options.verbose)
    _print_table(counts)
    print(f"{same} more differ from one of these in the cache of tables alone, and were not run")
    if not counts:
        print("no case was run: see which modules could not be imported, and the pattern")
        return 1
    return 1 if missing or counts[kinds.FAILED] + counts[kinds.HUNG] else 0


def _print(case: Case, found: Outcome, verbose: bool) -> None:
    """Print a case that did not pass, or any case if ``verbose``."""
    if found.kind == kinds.OTHER or (found.kind in kinds.GOOD and not verbose):
        return
    print(f"{found.kind}: {case}", flush=True)
    if found.why:
        print(f"    {found.text if verbose else found.why}")


def _print_table(counts: Counter[str]) -> None:
    ours = sum(counts.values()) - counts[kinds.OTHER]
    print(f"\n{ours} distinct cases of pipelines that swpipe stands for:")
    for kind in kinds.KINDS:
        print(f"  {counts[kind]:4}  {kind}")


def _compared(found: Outcome, theirs: Outcome | None) -> Outcome:
    """Return the outcome, marked if TorchRec's own pipeline fails with the same error."""
    if theirs is not None and (theirs.kind, theirs.why) == (kinds.FAILED, found.why):
        return replace(found, kind=kinds.ALIKE)
    return found


def _outcome(case: Case, timeout_s: float, *, on_ours: bool = True) -> Outcome | None:
    """Run one case in a process of its own."""
    used_read, used_write = os.pipe()
    result_read, result_write = os.pipe()
    child = os.fork()
    if child == 0:
        _run(case, used_write, result_write, on_ours)
    for descriptor in (used_write, result_write):
        os.close(descriptor)
    data = _read(result_read, time.monotonic() + timeout_s)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    used = _read(used_read, time.monotonic())
    for descriptor in (used_read, result_read):
        os.close(descriptor)
    if data:
        return told(pickle.loads(data), used)
    if not used:
        return Outcome(kinds.NEEDS_GPU, "the process died")
    return Outcome(kinds.HUNG, f"no result within {timeout_s:g} s, or the process died")


def _read(descriptor: int, deadline: float) -> bytes:
    """Return everything that is written until the deadline."""
    data = b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            break
        data += chunk
    return data


def _run(case: Case, used: int, result: int, on_ours: bool) -> NoReturn:
    """Run a case in the forked process, and write the texts of errors, failures and skips."""
    os.setpgid(0, 0)
    report_use(used, on_ours=on_ours)
    quiet = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(quiet, descriptor)
    done = case.run()
    skipped = [why for _, why in done.skipped]
    with os.fdopen(result, "wb") as file:
        file.write(pickle.dumps(([text for _, text in [*done.errors, *done.failures]], skipped)))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
