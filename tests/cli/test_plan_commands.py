"""`swpipe plan`, from the outside: what it prints, writes and answers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.cli import user_inputs
from swpipe.cli.user_errors import UserError
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.task_memory import Block, TaskMemory
from swpipe.planning import simulate as simulate_plan
from swpipe.trace import Row, Span, Trace
from tests.cli.test_cli import needs_matplotlib, out, refused, run

LOOP = """
import time
import torch
from swpipe import PipelineTask, TypedContext

weight = torch.zeros(4)


def load(ctx):
    ctx.x = ctx.batch + 1


def learn(ctx):
    weight.add_(ctx.x)


def loop():
    tasks = [PipelineTask("load", load, pure=True), PipelineTask("learn", learn)]
    return tasks, [torch.ones(4)] * 60


class SlowLoader:
    def __iter__(self):
        for batch in [torch.ones(4)] * 60:
            time.sleep(0.002)
            yield batch


def slowly_loaded():
    return loop()[0], SlowLoader()


class Ctx(TypedContext):
    def more(self):
        return self.batch + 1


def load_typed(ctx):
    ctx.x = ctx.more()


def typed():
    tasks = [PipelineTask("load", load_typed, pure=True), PipelineTask("learn", learn)]
    return tasks, [torch.ones(4)] * 60, Ctx


def mistyped():
    return [PipelineTask("load", load, pure=True)], [torch.ones(4)], dict


def nothing():
    return 3


def strange():
    return [load], [1]


def asking(path):
    return loop()


def raising():
    raise OSError("no such data")


def short():
    return [PipelineTask("load", load, pure=True), PipelineTask("learn", learn)], []

"""

COSTS = CostModel({"load": TaskCost(host_us=3000), "learn": TaskCost(host_us=2000)})
PLAN = PipelinePlan.from_dict(
    {
        "deps": [["learn", "load"]],
        "cross_iter_deps": [["learn", "learn", 1]],
        "schedule": {"load": {}, "learn": {}},
    }
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a workload of the user's, costs and a plan."""
    (tmp_path / "my_loop.py").write_text(LOOP)
    COSTS.save(tmp_path / "costs.json")
    PLAN.save(tmp_path / "plan.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_loop", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


# ------------------------------------------------------------------- infer


def test_dependences_of_the_users_own_tasks_are_inferred(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints what each task uses, writes the inferred plan, and compares another one."""
    PipelinePlan.from_dict({"schedule": {"load": {}, "learn": {}}}).save(here / "bare.toml")
    args = ("--workload", "my_loop:typed", "--plan", "bare.toml", "--output", "found.toml")
    said = out(capsys, "plan", "infer", *args)
    assert re.search(r"^load +ctx\.batch +ctx\.x$", said, re.MULTILINE)
    assert '("learn", "load") in deps, for ctx.x' in said
    assert "missing" in said
    assert PipelinePlan.load(here / "found.toml").deps == (("learn", "load"),)


def test_the_image_model_lacks_no_dependence(capsys: pytest.CaptureFixture[str]) -> None:
    """Its ready-made plan declares all dependences that a recording finds."""
    printed = out(capsys, "plan", "infer", "--plan", "pipelined")
    assert "no dependence is missing" in printed


# ------------------------------------------------------------------- check


def test_an_unsafe_plan_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error has the pair, and the edge that fixes it."""
    PipelinePlan.from_dict(
        {"schedule": {"load": {"thread_group": "io"}, "learn": {"stage": 1}}}
    ).save(here / "unsafe.toml")
    told = refused(capsys, "plan", "check", "unsafe.toml", "--workload", "my_loop:loop")
    assert told.startswith("swpipe: plan unsafe.toml: ")
    assert 'deps=[("learn", "load")]' in told


def test_a_budget_is_checked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too many bytes in flight are refused, with the largest attribute."""
    args = ("--workload", "my_loop:loop", "--budget", 1)
    assert "ctx.x" in refused(capsys, "plan", "check", "plan.toml", *args)


# ---------------------------------------------------------------- simulate


@needs_matplotlib
def test_a_plan_is_simulated_from_costs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints interval and bounds; its timeline is drawn above a measured one."""
    simulate_plan(PLAN, COSTS, streams=False).trace().save(here / "m.json")
    args = ("--costs", "costs.json", "--keep-costs", "out/costs.json")
    args += ("--measured", "m.json", "--picture", "both.svg")
    said = out(capsys, "plan", "simulate", "plan.toml", *args)
    assert said.index("predicted\n") < said.index("measured\n")
    assert "simulated: 5.000 ms per iteration" in said
    assert "ResMII: 5.000 ms" in said
    assert "measured" in (here / "both.svg").read_text()
    assert CostModel.load(here / "out" / "costs.json") == COSTS


def test_costs_are_measured_where_none_are_given(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are measured on the workload's own batches, in contexts of its own class."""
    args = ("--workload", "my_loop:typed", "--keep-costs", "measured.json")
    assert "thread  default" in out(capsys, "plan", "simulate", "serial", *args)
    measured = CostModel.load(here / "measured.json")
    assert set(measured.tasks) == {"load", "learn"}
    assert all(cost.host_us > 0 for cost in measured.tasks.values())


# -------------------------------------------------------------------- auto


def test_a_plan_is_chosen_from_costs_and_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second thread saves the time that the first one waits."""
    args = ("--costs", "costs.json", "--output", "best.toml")
    assert out(capsys, "plan", "auto", "plan.toml", *args).startswith(
        "3.000 ms per iteration, 2 iterations in flight, 2 "
    )
    chosen = PipelinePlan.load(here / "best.toml")
    assert len({entry.thread_group for entry in chosen.schedule.values()}) == 2
    args = ("--costs", "costs.json", "--groups", 1)
    assert out(capsys, "plan", "auto", "plan.toml", *args).startswith("5.000 ms per iteration")


def test_a_limit_to_memory_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan and the costs have the tasks' memory; `simulate` prints what a plan holds."""
    monkeypatch.chdir(tmp_path)
    plan = PipelinePlan({"read": TaskSchedule(), "work": TaskSchedule()}, deps=[("work", "read")])
    memory = TaskMemory((Block("read", "work", 2**20, "x"),))
    plan.save("plan.toml")
    CostModel({"read": TaskCost(100), "work": TaskCost(100)}, memory=memory).save("costs.json")
    args = ("plan", "auto", "plan.toml", "--costs", "costs.json", "--max-bytes")
    assert "The limit of 1 MiB costs 0.100 ms per iteration" in out(
        capsys, *args, 2**20, "--output", "best.toml"
    )
    assert "memory: at most 1 MiB in 1 iteration" in out(
        capsys, "plan", "simulate", "best.toml", "--costs", "costs.json"
    )
    assert "the smallest peak found is 1 MiB" in refused(capsys, *args, 2**19)


@pytest.mark.usefixtures("here")
def test_a_limit_to_memory_is_kept_without_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The memory of the tasks is measured then."""
    assert run("plan", "auto", "--workload", "my_loop:typed", "--max-bytes", 1) == 2
    told = capsys.readouterr().err
    assert "no plan was found that holds max_bytes of 1 B at most" in told


@pytest.mark.parametrize(("args", "seconds"), [((), 60), (("--seconds", 7), 7)])
def test_plan_auto_keeps_to_a_time(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[object, ...],
    seconds: float,
) -> None:
    """The default is a minute."""
    given: list[float] = []

    def tune(loop: Any, limits: Any, ready_made: Any, seconds: float) -> None:
        given.append(seconds)
        raise UserError("that is enough")

    monkeypatch.setattr(user_inputs, "tune", tune)
    assert "enough" in refused(capsys, "plan", "auto", "--workload", "my_loop:loop", *args)
    assert given == [seconds]


def test_a_plan_is_made_for_the_users_own_tasks(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tasks are recorded and measured; the plan is safe."""
    args = ("--workload", "my_loop:loop", "--output", "best.toml", "--keep-costs", "kept.json")
    assert "per iteration" in out(capsys, "plan", "auto", *args)
    assert json.loads((here / "kept.json").read_text())["tasks"]
    said = out(capsys, "plan", "check", "best.toml", "--workload", "my_loop:loop")
    assert "orders are kept in every interleaving" in said
    assert "in flight" in said


# ------------------------------------------------------- profile and trace


def test_the_users_own_tasks_are_profiled(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loop is profiled under the serial plan, their only one; several batches under a file."""
    args = ("profile", "--rounds", 2, "--output", "profile.json", "--workload")
    several = ("my_loop:loop", "--plan", "plan.toml", "--batches", 2, "--serially")
    for given, of in (
        (("my_loop:typed",), [("loop", "pipelined")]),
        (several, [("batch 0", "serial"), ("batch 1", "serial")]),
    ):
        said = out(capsys, *args, *given)
        assert "\nload " in said
        assert "\nlearn " in said
        saved = json.loads((here / "profile.json").read_text())
        results = saved["batches"]
        assert [(result["batch"], result["mode"]) for result in results] == of
        assert all(set(result["tasks"]) == {"load", "learn"} for result in results)
        sampled = "60 batches were seen" in results[0]["measurement"]["coverage"]
        assert sampled == (len(of) == 1)


def test_a_loader_of_the_users_own_is_traced(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its calls take time in the timeline, as they do in a profile.

    Once all batches were pulled before, and a step that waited for its loader looked busy.
    """
    args = ("--workload", "my_loop:slowly_loaded", "--steps", 5, "--timeline", "slow.json")
    assert run("train", *args) == 0
    assert "<pull>" in out(capsys, "trace", "slow.json")
    spans = Trace.load(here / "slow.json").spans
    pulls = [span for span in spans if span.task == "<pull>"]
    assert len(pulls) == 5
    assert all(span.duration_ns >= 2e6 for span in pulls)


@needs_matplotlib
def test_by_default_four_iterations_are_drawn_with_names_legend_and_title(here: Path) -> None:
    """Twelve iterations showed only their numbers."""
    names = ("decode", "forward", "backward", "optimizer")
    spans = [
        Span(name, i, Row("thread", "default"), (4 * i + k) * 10**7, (4 * i + k + 1) * 10**7)
        for i in range(12)
        for k, name in enumerate(names)
    ]
    Trace(spans).save(here / "steps.json")
    assert run("trace", "steps.json", "--output", "steps.svg") == 0
    written = re.findall(r"<text[^>]*>([^<]*)</text>", (here / "steps.svg").read_text())
    assert len([text for text in written if text.startswith(names)]) == 4 * 4
    assert len([text for text in written if re.fullmatch(r"iteration \d+", text)]) == 4
    assert any(text.startswith("steps: 40.0") for text in written)


def test_a_workloads_own_error_is_told(here: Path) -> None:
    """It is raised unchanged, with its traceback and the workload that raised it."""
    with pytest.raises(OSError, match="no such data") as caught:
        run("plan", "infer", "--workload", "my_loop:raising")
    assert "my_loop:raising was called without arguments for" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="argument: 'path'") as caught_too:
        run("plan", "infer", "--workload", "my_loop:asking")
    assert "my_loop:asking was called without arguments for" in caught_too.value.__notes__[0]
