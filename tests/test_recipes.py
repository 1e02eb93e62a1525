"""The recipes of CONTRIBUTING.md for a device, a planner and a system.

``tests/core/test_new_field.py`` adds a schedule field, ``tests/test_pipeline.py`` an observer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import swpipe.plans
import swpipe.tasks
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.analysis import verify
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.effects import Effects, Location
from swpipe.device import CpuDevice
from swpipe.planning import lower_bounds, simulate


def read(ctx: IterContext) -> None:
    ctx.x = ctx.batch + 1


def train(ctx: IterContext) -> None:
    ctx.y = 2 * ctx.x


TASKS = (PipelineTask("read", read), PipelineTask("train", train))
PLAN = replace(PipelinePlan.serial(TASKS), deps=(("train", "read"),), order=())


class CountingDevice(CpuDevice):
    """The CPU with a count of the host's waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_a_device_is_a_class_that_is_passed() -> None:
    """A device of one's own runs a pipeline, and is asked what devices are asked."""
    device = CountingDevice()
    with SWPipeline(PLAN, device=device) as pipe:
        assert [ctx.y for ctx in pipe.iterate(range(3))] == [2, 4, 6]
        pipe.run(range(3))
    assert device.waits > 0


def feed_ahead(plan: PipelinePlan, ahead: Iterable[str]) -> PipelinePlan:
    """Return a plan that runs these tasks one stage ahead of the others, on a separate thread."""
    ahead = set(ahead)
    schedule = {
        name: replace(entry, stage=0, thread_group="feed")
        if name in ahead
        else replace(entry, stage=1)
        for name, entry in plan.schedule.items()
    }
    return replace(plan, schedule=schedule, pipeline_depth=None)


def test_a_planner_is_a_function_from_plan_to_plan() -> None:
    """Its plan passes the verifier, reaches the simulator's bound, and gives the serial results."""
    plan = feed_ahead(PLAN, ["read"])
    x, y = Location("x", persistent=False), Location("y", persistent=False)
    effects = {
        "read": Effects(writes=frozenset({x})),
        "train": Effects(reads=frozenset({x}), writes=frozenset({y})),
    }
    verify(plan, TASKS, effects, pull_ahead=True)
    costs = CostModel({"read": TaskCost(host_us=900.0), "train": TaskCost(host_us=1000.0)})
    bound = lower_bounds(plan, costs, streams=False, threads=2)
    assert simulate(plan, costs, streams=False).ii_us == bound.ii_us == 1000.0
    with SWPipeline(plan, TASKS, device="cpu") as pipe:
        assert [ctx.y for ctx in pipe.iterate(range(3))] == [2, 4, 6]


SYSTEM = {
    "plans/echo.py": """
from swpipe.plans.prefetch import prefetch_plan

PLANS = {"ahead": lambda: prefetch_plan(["read"], ["train"])}
""",
    "tasks/echo/__init__.py": "",
    "tasks/echo/echo_loop.py": """
from swpipe import task


@task(pure=True)
def read(ctx):
    ctx.x = ctx.batch + 1


@task
def train(ctx):
    ctx.loss = 2.0 * ctx.x


def loop():
    return [read, train], range(4)
""",
}
"""The files of a system, from ``swpipe`` on."""


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A copy of the package with a new system."""
    for name, text in SYSTEM.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for package in (swpipe.plans, swpipe.tasks):
        folder = tmp_path / package.__name__.rpartition(".")[2]
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    yield
    for name in [name for name in sys.modules if ".echo" in name]:
        del sys.modules[name]


@pytest.mark.usefixtures("system")
def test_a_system_is_folders_of_one_name() -> None:
    """Its plan gives the numbers of the serial run."""
    tasks, batches = importlib.import_module("swpipe.tasks.echo.echo_loop").loop()
    plans = importlib.import_module("swpipe.plans.echo").PLANS
    with SWPipeline(plans["ahead"](), tasks, device="cpu") as pipe:
        assert [ctx.loss for ctx in pipe.iterate(batches)] == [2.0, 4.0, 6.0, 8.0]


def test_each_system_has_a_page() -> None:
    """A folder of tasks has a page of its name; its plans have that name, too."""
    root = Path(__file__).parent.parent
    folders = {path.parent.name for path in (root / "swpipe" / "tasks").glob("*/__init__.py")}
    pages = {path.stem for path in (root / "docs" / "guide").glob("*.md")}
    plans = {path.stem for path in (root / "swpipe" / "plans").glob("[!_]*")}
    assert folders - pages == set()
    assert plans - folders == {"prefetch"}
