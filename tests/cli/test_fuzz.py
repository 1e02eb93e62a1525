"""Whatever a plan, cost or timeline file contains: a command succeeds, or says why in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from swpipe.cli import main
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import MOST_ITERATIONS, MOST_TASKS, MOST_WORK
from tests.core.test_fuzz import COSTS, MODEL, PLANS
from tests.support.hostile import MOST_IN_ONE_LINE, edited, mostly, replaced
from tests.support.plans_for_tests import piped
from tests.support.scripts import Script, Scripts
from tests.trace.test_fuzz import SAVED

QUICK = 10
ADDRESS_SPACE = 4 * 2**30
CPU_S = 60  # ends a command that would never end; how long one takes is no verdict here

GOOD = piped(3)
GOOD_COSTS = CostModel({name: TaskCost(host_us=1) for name in GOOD.schedule})
PLAN_TEXTS = mostly(PLANS).map(json.dumps) | edited(GOOD.to_json())
COST_TEXTS = COSTS.map(json.dumps) | edited(MODEL.to_json())
TIMELINE_TEXTS = replaced(SAVED) | edited(json.dumps(SAVED))


def outcome(*args: object) -> None:
    """Run a command: it succeeds and shows nothing that a terminal obeys, or ends in one line."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    said = err.getvalue()
    assert out.getvalue().replace("\n", "").isprintable()
    if ended.value.code == 0:
        assert said == ""
        return
    assert ended.value.code == 2
    assert said.startswith("swpipe: ")
    assert said.endswith("\n")
    assert said[:-1].isprintable()
    assert len(said) <= MOST_IN_ONE_LINE


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A folder with a plan and its costs."""
    (tmp_path / "good.json").write_text(GOOD.to_json())
    GOOD_COSTS.save(tmp_path / "good_costs.json")
    return tmp_path


def written(folder: Path, name: str, text: str) -> Path:
    """A file with any text."""
    (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    return folder / name


@given(json_text=PLAN_TEXTS, toml_text=edited(GOOD.to_toml()))
@settings(max_examples=QUICK)
def test_plans_of_any_values(json_text: str, toml_text: str, tmp_path: Path) -> None:
    """JSON with strange values, and good files with a part replaced; shown, and written again."""
    for name, text in (("plan.json", json_text), ("plan.toml", toml_text)):
        plan = written(tmp_path, name, text)
        outcome("plan", "show", plan, "--output", tmp_path / "written.toml")


@given(text=COST_TEXTS)
@settings(max_examples=QUICK)
def test_costs_of_any_values(text: str, good: Path) -> None:
    """Strange names and numbers, and a good file with a part replaced; a plan is simulated."""
    outcome("plan", "simulate", good / "good.json", "--costs", written(good, "costs.json", text))


@given(text=TIMELINE_TEXTS)
@settings(max_examples=QUICK)
def test_timelines_of_any_values(text: str, good: Path) -> None:
    """Infinite times, strange names, text cut anywhere; shown below a prediction."""
    args = ("--costs", good / "good_costs.json", "--measured", written(good, "t.json", text))
    outcome("plan", "simulate", good / "good.json", *args)


# ------------------------------------------------------------------------------ limited processes


def most_tasks() -> dict[str, Any]:
    """As many tasks as a plan may have, each after the one before."""
    names = [f"t{k}" for k in range(MOST_TASKS)]
    return {"schedule": {name: {} for name in names}, "deps": [*pairwise(names)]}


def most_work() -> dict[str, Any]:
    """As many tasks in as many stages as may be compiled, on threads of their own."""
    count = MOST_WORK // MOST_ITERATIONS
    entries = {f"t{k}": {"stage": k, "thread_group": f"g{k % 9}"} for k in range(count)}
    return {"schedule": entries, "deps": [[f"t{k}", f"t{k - 1}"] for k in range(1, count)]}


def most_distance() -> dict[str, Any]:
    """A dependence on the farthest iteration, and the deepest pipeline."""
    far = MOST_ITERATIONS
    return {"schedule": {"a": {}, "b": {"stage": 1}}, "cross_iter_deps": [["a", "b", far]]}


def unknown_names() -> dict[str, Any]:
    """A file of some megabytes whose dependences are all wrong."""
    return {"schedule": {"a": {}}, "deps": [["a", f"{k}" * 9] for k in range(50_000)]}


LIMITED = f"""
import resource
from swpipe.cli import main
resource.setrlimit(resource.RLIMIT_AS, ({ADDRESS_SPACE}, {ADDRESS_SPACE}))
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S}))
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("make", [most_tasks, most_work, most_distance, unknown_names])
def test_the_hardest_plans_stay_within_memory(
    scripts: Scripts, make: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    """Success or one line, in an address space of 4 GiB."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(make()))
    ended = scripts.run(Script(LIMITED, args=("plan", "show", str(plan))))
    assert ended.returncode in (0, 2)
    assert ended.stderr.count("\n") == (ended.returncode == 2)
    assert len(ended.stderr) <= MOST_IN_ONE_LINE
