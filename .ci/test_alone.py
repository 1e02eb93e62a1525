"""Run each quick test alone, in a fresh process: what passes only after other tests fails here.

    this process          imports torch and pytest once
      fork, each file     pytest collects the file, as for `pytest FILE::TEST`
        fork, each test   runs that test with all its fixtures, and ends

A fork costs 30 ms, an interpreter that imports torch 3 s. Each result is one line of RESULTS. Tests
that have passed or skipped there are not run again, so a run can be interrupted, and failures
repeated after a change; delete the file to begin anew. Arguments are files and folders of tests.
The tests of an accelerator are left out: no device can be used after a fork.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "out" / "test-alone.jsonl"


def results() -> dict[str, str]:
    """Return the last outcome of each test that has been run."""
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    return {row["test"]: row["outcome"] for row in map(json.loads, lines)}


def record(test: str, outcome: str, text: str = "") -> None:
    """Append one result."""
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "text": text[-6000:]}) + "\n")


class EachInAFork:
    """A plugin of pytest: run each test in a forked process, which records how the test ended."""

    def __init__(self) -> None:
        self._done = {test for test, outcome in results().items() if outcome != "failed"}
        self._reports: list[pytest.TestReport] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests that have not passed before."""
        # The parent owns the folder of `tmp_path`: each child would leave one of its own behind.
        session.config._tmp_path_factory.getbasetemp()
        for item in [item for item in session.items if item.nodeid not in self._done]:
            if (process := os.fork()) == 0:
                try:
                    self._run(item)
                finally:
                    os._exit(1)
            if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
                record(item.nodeid, "failed", f"its process ended with code {code}")
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def _run(self, item: pytest.Item) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        outcomes = {report.outcome for report in self._reports}
        outcome = next(kind for kind in ("failed", "skipped", "passed") if kind in outcomes)
        record(item.nodeid, outcome, "\n".join(report.longreprtext for report in self._reports))
        os._exit(0)


def main(arguments: list[str]) -> int:
    """Run the tests of the arguments, or all quick tests; return 1 if any fails."""
    os.nice(19)
    os.chdir(ROOT)
    RESULTS.parent.mkdir(exist_ok=True)
    sys.path.insert(0, str(ROOT))
    import torch._dynamo  # noqa: F401  the first optimizer of each process would import it

    from tests.support import servers

    servers.folder()  # one set of servers for all tests
    roots = [ROOT / argument for argument in arguments or ["tests"]]
    paths = [file for root in roots for file in (sorted(root.rglob("test_*.py")) or [root])]
    for path in [path for path in paths if "accelerator" not in path.parts]:
        process = os.fork()
        if process == 0:
            options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "--no-header"]
            code = pytest.main([str(path), *options], [EachInAFork()])
            os._exit(code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        record(f"collection of {path.relative_to(ROOT)}", "failed" if code else "passed")
    outcomes = results()
    for test in sorted(test for test, outcome in outcomes.items() if outcome == "failed"):
        print(f"failed alone: {test}")
    print(dict(Counter(outcomes.values())))
    return "failed" in outcomes.values()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
