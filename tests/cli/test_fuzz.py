"""The hardest plans that a file may contain: shown, or refused in one line, in little memory.

Files of any values are in ``tests/core/test_fuzz.py`` and ``tests/trace/test_fuzz.py``: what these
refuse is told in one line, as ``test_errors`` has it.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from swpipe.core.plan import MOST_ITERATIONS, MOST_TASKS, MOST_WORK
from tests.support.hostile import MOST_IN_ONE_LINE
from tests.support.scripts import Script, Scripts

ADDRESS_SPACE = 4 * 2**30
CPU_S = 60  # ends a command that would never end; how long one takes is no verdict here


def most_tasks() -> dict[str, Any]:
    """Return a plan of the maximum number of tasks, in sequence."""
    names = [f"t{k}" for k in range(MOST_TASKS)]
    return {"schedule": {name: {} for name in names}, "deps": [*pairwise(names)]}


def most_work() -> dict[str, Any]:
    """Return a plan of the maximum work for the compiler, on a thread per task."""
    count = MOST_WORK // MOST_ITERATIONS
    entries = {f"t{k}": {"stage": k, "thread_group": f"g{k % 9}"} for k in range(count)}
    return {"schedule": entries, "deps": [[f"t{k}", f"t{k - 1}"] for k in range(1, count)]}


def most_distance() -> dict[str, Any]:
    """Return a plan with the largest distance and the greatest depth."""
    far = MOST_ITERATIONS
    return {"schedule": {"a": {}, "b": {"stage": 1}}, "cross_iter_deps": [["a", "b", far]]}


def unknown_names() -> dict[str, Any]:
    """Return a file of some megabytes whose dependences are all wrong."""
    return {"schedule": {"a": {}}, "deps": [["a", f"{k}" * 9] for k in range(50_000)]}


LIMITED = f"""
import resource
from swpipe.cli import main
resource.setrlimit(resource.RLIMIT_AS, ({ADDRESS_SPACE}, {ADDRESS_SPACE}))
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S}))
main()
"""


@pytest.mark.slow
def test_the_hardest_plans_stay_within_memory(scripts: Scripts, tmp_path: Path) -> None:
    """The command succeeds, or prints one line, within an address space of 4 GiB."""
    limited = []
    for make in (most_tasks, most_work, most_distance, unknown_names):
        plan = tmp_path / f"{make.__name__}.json"
        plan.write_text(json.dumps(make()))
        args = ("plan", "show", str(plan))
        limited.append(Script(LIMITED, args=args, is_torn_down=False))
    for ended in scripts.run_together(limited):
        assert ended.returncode in (0, 2)
        assert ended.stderr.count("\n") == (ended.returncode == 2)
        assert len(ended.stderr) <= MOST_IN_ONE_LINE
