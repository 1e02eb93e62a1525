"""Plant each fault of the lists in a copy of the tree, and print which of them no test finds.

    python -m tests.mutants [LIST or NAME ...] [--jobs N]

Each job has a copy of the tree of its own. There it makes the edit, runs the fault's tests until
one fails, and takes the edit back. A test that fails without any fault proves nothing: at the end
the tests that failed run once more, on the code as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from tests.mutants.faults import ROOT, Fault, all_faults

ACCELERATOR = "tests/device/accelerator/"
"""Tests that run in a process with an accelerator; a fault has only these, or only others."""

LIMIT_S = 300.0
"""Seconds that the tests of one fault may take. A hang counts as found: it is not silent."""


class Outcome(NamedTuple):
    """The outcome of a fault, and the node id of the test that failed, if one did."""

    fault: Fault
    verdict: str
    test: str


def copied_tree(folder: Path) -> Path:
    """Copy the files of the work tree that git does not ignore, and return the copy's root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(os.path.exists, (ROOT / line for line in listed.split("\0") if line)):
        target = folder / name.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, target, follow_symlinks=False)
    return folder


def write(path: Path, text: str) -> None:
    """Write a module, and remove its bytecode: its time stamp cannot tell quick edits apart."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(tree: Path, tests: list[str], *options: str) -> tuple[int | None, list[str]]:
    """Run tests in a copy of the tree.

    Returns:
        Pytest's exit status, or None if the time was over; the node ids of the tests that failed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *options]
    if any(test.startswith(ACCELERATOR) for test in tests):
        command.append("--accelerator")
    running = subprocess.Popen(
        [*command, *tests],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = running.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        return None, []
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, flags=re.MULTILINE)
    return running.returncode, failed


def try_fault(tree: Path, fault: Fault) -> Outcome:
    """Plant a fault, run its tests, and take it back."""
    path = tree / fault.file
    text = path.read_text(encoding="utf-8")
    write(path, text.replace(fault.find, fault.replace))
    apart = all(test.startswith("tests/device/accelerator") for test in fault.tests)
    options = ["-x", "--accelerator"] if apart else ["-x"]
    try:
        status, failed = run_tests(tree, fault.tests, *options)
    finally:
        write(path, text)
    verdict = {None: "hung", 0: "survived", 1: "found"}.get(status, "no test ran")
    return Outcome(fault, verdict, failed[0] if failed else "")


def try_all(faults: list[Fault], trees: list[Path]) -> list[Outcome]:
    """Try the faults, as many at a time as there are copies of the tree."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def attempt(fault: Fault) -> Outcome:
        tree = free.get()
        outcome = try_fault(tree, fault)
        free.put(tree)
        print(f"{outcome.verdict:12} {fault.room}: {fault.name}  {outcome.test}", flush=True)
        return outcome

    with ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(attempt, faults))


def show(outcomes: list[Outcome], unreliable: set[str]) -> bool:
    """Print how many faults were found in each list, and those that were not.

    Returns:
        Whether each fault was found, or says why it may survive.
    """
    counts = {outcome.fault.room: [0, 0] for outcome in outcomes}
    left = []
    for fault, verdict, test in outcomes:
        counts[fault.room][0] += 1
        if test in unreliable:
            left.append((fault, f"{test} fails without the fault, too"))
        elif verdict in ("found", "hung"):
            counts[fault.room][1] += 1
        else:
            left.append((fault, verdict))
    total = sum(found for _, found in counts.values())
    rows = [[room, *pair] for room, pair in sorted(counts.items())]
    print(f"\n{tabulate([*rows, ['all', len(outcomes), total]], ['list', 'faults', 'found'])}")
    print(f"\n{100 * total / len(outcomes):.1f}% found\n")
    table = [(f.room, f.name, what, f.survives or f.promise) for f, what in left]
    if table:
        print(tabulate(table, ["list", "fault", "what happened", "why, or the promise"]))
    return all(fault.survives and what == "survived" for fault, what in left)


def main() -> int:
    """Try the faults of the lists or names that are given, or all, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("chosen", nargs="*", help="lists, or names of faults; none means all")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    chosen = set(given.chosen)
    faults = [f for f in all_faults() if not chosen or {f.room, f.name} & chosen]
    unknown = chosen - {f.room for f in faults} - {f.name for f in faults}
    useless = [f"{fault.name}: {fault.problem()}" for fault in faults if fault.problem()]
    if unknown or useless:
        names = {name for fault in all_faults() for name in (fault.room, fault.name)}
        lines = [
            f"{name}: no list or fault has this name; close ones: "
            f"{', '.join(get_close_matches(name, names)) or 'none'}"
            for name in unknown
        ]
        parser.error("\n".join([*lines, *useless]))
    with tempfile.TemporaryDirectory() as folder:
        trees = [copied_tree(Path(folder) / str(job)) for job in range(max(1, given.jobs))]
        outcomes = try_all(faults, trees)
        failed = sorted({outcome.test for outcome in outcomes if outcome.test})
        unreliable = set(run_tests(trees[0], failed)[1]) if failed else set()
    return 0 if show(outcomes, unreliable) else 1


if __name__ == "__main__":
    sys.exit(main())
