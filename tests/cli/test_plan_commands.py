"""`swpipe plan`, from the outside: what it prints, writes and answers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.cli import arguments
from swpipe.cli.user_errors import UserError
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.task_memory import Block, TaskMemory
from swpipe.trace import Row, Span, Trace
from tests.cli.test_cli import needs_clicks, needs_matplotlib, refused, run
from tests.tasks.clicks.rows import write_log

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


class Loader:
    def __iter__(self):
        return iter([torch.ones(4)] * 60)


def loaded():
    return loop()[0], Loader()


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


def lazy():
    tasks, batches = loop()
    return tasks, iter(batches)


def short():
    return [PipelineTask("load", load, pure=True), PipelineTask("learn", learn)], []


def failing():
    def learn(ctx):
        raise OSError("the disk is gone")
    return [PipelineTask("load", load, pure=True), PipelineTask("learn", learn)], [torch.ones(4)]
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
    """A directory with a workload of the user's own, costs and a plan; the current one."""
    (tmp_path / "my_loop.py").write_text(LOOP)
    COSTS.save(tmp_path / "costs.json")
    PLAN.save(tmp_path / "plan.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_loop", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of 60 good rows."""
    return write_log(tmp_path / "log.tsv", 60)


def refused_last(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Run what must be refused after some progress was told: the last line of it."""
    assert run(*args) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("swpipe: ")
    return last


# ------------------------------------------------------------------- infer


def test_dependences_of_the_users_own_tasks_are_inferred(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What each task touches is printed; the plan that follows is written."""
    assert run("plan", "infer", "--workload", "my_loop:loop", "--output", "found.toml") == 0
    out = capsys.readouterr().out
    assert "ctx.batch" in out
    assert '("learn", "load") in deps, for ctx.x' in out
    assert PipelinePlan.load(here / "found.toml").deps == (("learn", "load"),)


def test_a_missing_dependence_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan is compared with what was recorded."""
    PipelinePlan.from_dict({"schedule": {"load": {}, "learn": {}}}).save(here / "bare.toml")
    assert run("plan", "infer", "--workload", "my_loop:loop", "--plan", "bare.toml") == 0
    out = capsys.readouterr().out
    assert "missing" in out
    assert '("learn", "load")' in out


@needs_clicks
def test_the_click_job_lacks_no_dependence(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    """Its ready-made plan declares all that a recording finds."""
    args = ("--data", log, "--batch-size", 8, "--plan", "pipelined")
    assert run("plan", "infer", *args) == 0
    assert "model parameters" in capsys.readouterr().out


# ------------------------------------------------------------------- check


def test_a_safe_plan_is_called_safe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With how much there was to keep, and what is in flight."""
    assert run("plan", "check", "plan.toml", "--workload", "my_loop:loop") == 0
    out = capsys.readouterr().out
    assert "orders are kept in every interleaving" in out
    assert "in flight" in out


def test_an_unsafe_plan_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pair, and the edge that mends it."""
    PipelinePlan.from_dict(
        {"schedule": {"load": {"thread_group": "io"}, "learn": {"stage": 1}}}
    ).save(here / "unsafe.toml")
    told = refused_last(capsys, "plan", "check", "unsafe.toml", "--workload", "my_loop:loop")
    assert told.startswith("swpipe: plan unsafe.toml: ")
    assert 'deps=[("learn", "load")]' in told


def test_a_budget_is_checked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too many bytes in flight are refused, with the largest attribute."""
    args = ("--workload", "my_loop:loop", "--budget", 1)
    told = refused_last(capsys, "plan", "check", "plan.toml", *args)
    assert "ctx.x" in told


# ---------------------------------------------------------------- simulate


def test_a_plan_is_simulated_from_costs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its timeline, its interval, its bounds; no tasks are needed."""
    args = ("--costs", "costs.json", "--timeline", "out/t.json", "--keep-costs", "out/costs.json")
    assert run("plan", "simulate", "plan.toml", *args) == 0
    out = capsys.readouterr().out
    assert "predicted" in out
    assert "simulated: 5.000 ms per iteration" in out
    assert "ResMII: 5.000 ms" in out
    assert Trace.load(here / "out" / "t.json").initiation_interval_s == pytest.approx(5e-3)
    assert CostModel.load(here / "out" / "costs.json") == COSTS


@needs_matplotlib
def test_predicted_and_measured_are_shown_one_above_the_other(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the terminal and in a picture."""
    assert (
        run("plan", "simulate", "plan.toml", "--costs", "costs.json", "--timeline", "m.json") == 0
    )
    capsys.readouterr()
    args = ("--costs", "costs.json", "--measured", "m.json", "--picture", "both.svg")
    assert run("plan", "simulate", "plan.toml", *args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("predicted") < lines.index("measured")
    assert "measured" in (here / "both.svg").read_text()


def test_costs_are_measured_where_none_are_given(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the workload's own batches."""
    args = ("--workload", "my_loop:loop", "--keep-costs", "measured.json")
    assert run("plan", "simulate", "serial", *args) == 0
    assert "thread  default" in capsys.readouterr().out
    measured = CostModel.load(here / "measured.json")
    assert set(measured.tasks) == {"load", "learn"}
    assert all(cost.host_us > 0 for cost in measured.tasks.values())


# -------------------------------------------------------------------- auto


@pytest.fixture
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is spent on the search for a plan, and its trial, says nothing about the command."""
    monkeypatch.setattr("swpipe.tuning.autotuning.EFFORT", 0.1)
    monkeypatch.setattr("swpipe.tuning.autotuning._ROUNDS", 2)


def test_a_plan_is_chosen_from_costs_and_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second thread earns what the first waits for."""
    args = ("--costs", "costs.json", "--output", "best.toml")
    assert run("plan", "auto", "plan.toml", *args) == 0
    assert capsys.readouterr().out.startswith("3.000 ms per iteration, 2 iterations in flight, 2 ")
    chosen = PipelinePlan.load(here / "best.toml")
    assert len({entry.thread_group for entry in chosen.schedule.values()}) == 2


def test_limits_are_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One thread: nothing overlaps on a CPU."""
    assert run("plan", "auto", "plan.toml", "--costs", "costs.json", "--threads", 1) == 0
    assert capsys.readouterr().out.startswith("5.000 ms per iteration")


def test_the_users_own_tasks_may_have_contexts_of_their_own(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recorded, measured and profiled with the class that the function returns."""
    assert run("plan", "infer", "--workload", "my_loop:typed") == 0
    assert re.search(r"^load +ctx\.batch +ctx\.x$", capsys.readouterr().out, re.MULTILINE)
    assert run("profile", "--workload", "my_loop:typed", "--rounds", 2) == 0
    assert "learn" in capsys.readouterr().out
    assert run("plan", "simulate", "plan.toml", "--workload", "my_loop:typed") == 0


def test_a_limit_to_memory_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a plan and costs that have the tasks' memory; `show` prints what a plan holds."""
    monkeypatch.chdir(tmp_path)
    plan = PipelinePlan({"read": TaskSchedule(), "work": TaskSchedule()}, deps=[("work", "read")])
    memory = TaskMemory((Block("read", "work", 2**20, "x"),))
    plan.save("plan.toml")
    CostModel({"read": TaskCost(100), "work": TaskCost(100)}, memory=memory).save("costs.json")
    args = ("plan", "auto", "plan.toml", "--costs", "costs.json", "--max-bytes")
    assert run(*args, 2**20, "--output", "best.toml") == 0
    assert "The limit of 1 MiB costs 0.100 ms per iteration" in capsys.readouterr().out
    assert run("plan", "show", "best.toml", "--costs", "costs.json") == 0
    assert "memory: at most 1 MiB in 1 iteration" in capsys.readouterr().out
    assert "the smallest peak found is 1 MiB" in refused(capsys, *args, 2**19)


@pytest.mark.usefixtures("quick_search", "here")
def test_a_limit_to_memory_is_kept_without_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """What the tasks hold is measured then."""
    assert run("plan", "auto", "--workload", "my_loop:typed", "--max-bytes", 1) == 2
    told = capsys.readouterr().err
    assert "no plan was found that holds max_bytes of 1 B at most" in told


@pytest.mark.parametrize(("args", "seconds"), [((), 60), (("--seconds", 7), 7)])
def test_plan_auto_keeps_to_a_time_and_shows_a_bar(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[object, ...],
    seconds: float,
) -> None:
    """A minute, unless it is told otherwise; it once took minutes without a sign of life."""
    given: dict[str, Any] = {}

    def autotune(tasks: Any, batches: Any, **options: Any) -> None:
        given.update(options)
        raise UserError("that is enough")

    monkeypatch.setattr(arguments, "autotune", autotune)
    assert "enough" in refused(capsys, "plan", "auto", "--workload", "my_loop:loop", *args)
    assert (given["seconds"], given["verbose"]) == (seconds, True)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_search")
def test_a_plan_is_made_for_the_users_own_tasks(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recorded, measured, planned; the plan runs."""
    args = ("--workload", "my_loop:loop", "--output", "best.toml", "--keep-costs", "kept.json")
    assert run("plan", "auto", *args) == 0
    assert "per iteration" in capsys.readouterr().out
    assert run("plan", "check", "best.toml", "--workload", "my_loop:loop") == 0
    assert json.loads((here / "kept.json").read_text())["tasks"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_search")
@needs_clicks
def test_training_under_auto_says_what_it_expects_and_what_it_got(
    capsys: pytest.CaptureFixture[str], log: Path
) -> None:
    """And the numbers are the serial ones."""
    assert run("train", "--data", log, "--batch-size", 8, "--compare", "serial,auto") == 0
    out = capsys.readouterr().out
    assert out.startswith("auto: ")
    assert "serial and auto: bit-equal: 8 losses and 37 parameters" in out
    assert "auto: expected " in out


@pytest.mark.usefixtures("quick_search", "here")
def test_a_profile_under_auto_makes_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """As training does; the help offers it."""
    args = ("--workload", "my_loop:loop", "--plan", "auto", "--rounds", 2)
    assert run("profile", *args) == 0
    out = capsys.readouterr().out
    assert out.startswith("auto: ")
    assert "batch 0, pipelined: " in out


# ------------------------------------------------------- profile and trace


def test_the_users_own_tasks_are_profiled(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under the serial plan, as they have no other, and under a file."""
    args = ("profile", "--workload", "my_loop:loop", "--rounds", 2, "--output", "profile.json")
    for plan in ((), ("--plan", "plan.toml")):
        assert run(*args, *plan) == 0
        out = capsys.readouterr().out
        assert "\nload " in out
        assert "\nlearn " in out
        (result,) = json.loads((here / "profile.json").read_text())
        assert set(result["exposed_s"]) == {"load", "learn"}


def test_a_loader_of_the_users_own_is_profiled(here: Path) -> None:
    """It is a row; a list, as above, has no calls."""
    args = ("--rounds", 2, "--output", "profile.json")
    assert run("profile", "--workload", "my_loop:loaded", *args) == 0
    (result,) = json.loads((here / "profile.json").read_text())
    assert set(result["exposed_s"]) == {"<pull>", "load", "learn"}


def test_the_users_own_tasks_are_traced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So many steps are recorded, after a few that warm up; a picture is drawn where one is named.

    `trace` knew saved timelines only, and `train`, which saves them, does not train such tasks.
    """
    args = ("trace", "--workload", "my_loop:loop", "--steps", 5, "--timeline", "out/timeline.json")
    assert run(*args) == 0
    assert "initiation interval" in capsys.readouterr().out
    recorded = Trace.load(here / "out" / "timeline.json")
    assert {span.task for span in recorded.spans} >= {"load", "learn"}
    assert len({span.iteration for span in recorded.spans}) == 5
    assert list((here / "out").iterdir()) == [here / "out" / "timeline.json"]


def test_a_loader_of_the_users_own_is_traced(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its calls take their time in the timeline, as they do in a profile.

    All batches were once pulled before, and a step that waited for its loader looked busy.
    """
    args = ("--steps", 5, "--timeline", "slow.json")
    assert run("trace", "--workload", "my_loop:slowly_loaded", *args) == 0
    assert "<pull>" in capsys.readouterr().out
    spans = Trace.load(here / "slow.json").spans
    pulls = [span for span in spans if span.task == "<pull>"]
    assert len(pulls) == 5
    assert all(span.duration_ns >= 2e6 for span in pulls)


@needs_matplotlib
def test_a_traced_workload_is_drawn(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Into the picture that was named, under the plan that was named."""
    args = ("trace", "--workload", "my_loop:loop", "--plan", "plan.toml", "--output", "new.png")
    assert run(*args) == 0
    assert "drawn into new.png" in capsys.readouterr().out
    assert (here / "new.png").read_bytes().startswith(b"\x89PNG")


@needs_matplotlib
def test_by_default_four_iterations_are_drawn_with_names_legend_and_title(here: Path) -> None:
    """Of twelve, which showed nothing but their numbers."""
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


def test_a_trace_is_saved_or_recorded(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved timeline or a workload has to be named, and not both."""
    own = ("--workload", "my_loop:loop")
    for args in ((), ("timeline.json", *own)):
        assert "name a saved timeline, or a --workload" in refused(capsys, "trace", *args)
    told = refused(capsys, "trace", "timeline.json", "--timeline", "new.json")
    assert "--timeline: it is for what is recorded" in told


@pytest.mark.parametrize("command", ["profile", "trace"])
def test_too_few_batches_are_told(
    here: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """In one line; a profile of no batches ended in a traceback."""
    told = refused(capsys, command, "--workload", "my_loop:short")
    assert "workload my_loop:short: it gives 0 batches" in told


# --------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        ("my_loop", "module:function"),
        ("my_loop:gone", "no function 'gone'"),
        ("not_there:loop", "not_there"),
        ("my_loop:nothing", "return (tasks, batches)"),
        ("my_loop:strange", "no PipelineTask; @swpipe.task makes one"),
        ("my_loop:asking", "missing a required argument: 'path'; name a function that is called"),
        ("my_loop:mistyped", "give a subclass of TypedContext"),
        ("my_loop:short", "gives 0 batches"),
    ],
)
def test_a_workload_that_is_none_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], workload: str, says: str
) -> None:
    """It says what to return."""
    assert says in refused_last(capsys, "plan", "infer", "--workload", workload)


def test_a_recorded_iteration_that_fails_is_told(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As itself: it is the user's own error, with its traceback."""
    with pytest.raises(OSError, match="the disk is gone"):
        run("plan", "infer", "--workload", "my_loop:failing")


def test_a_workloads_own_error_is_told(here: Path) -> None:
    """As itself, with its traceback, and with the workload that raised it."""
    with pytest.raises(OSError, match="no such data") as caught:
        run("plan", "infer", "--workload", "my_loop:raising")
    assert "while my_loop:raising was called" in caught.value.__notes__[0]


def test_the_batches_of_a_workload_may_come_from_a_generator(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or any loader; the refusal of too few says so."""
    args = ("--steps", 5, "--output", "new.png")
    assert run("trace", "--workload", "my_loop:lazy", *args) == 0
    told = refused_last(capsys, "trace", "--workload", "my_loop:short", *args)
    assert "gives 0 batches, where 8 are needed; it may return a loader" in told


def test_the_workload_that_the_guide_shows_is_traced(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gives as many batches as are asked for by default."""
    shown = Path(__file__).parents[2] / "docs" / "examples" / "my_loop.py"
    (here / "shown_loop.py").write_text(shown.read_text())
    assert run("trace", "--workload", "shown_loop:loop", "--timeline", "shown.json") == 0


def test_costs_that_are_missing_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With those that there are."""
    CostModel({"load": TaskCost()}).save(here / "few.json")
    for command in ("simulate", "auto"):
        told = refused(capsys, "plan", command, "plan.toml", "--costs", "few.json")
        assert "task 'learn' has no cost" in told


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1 column 2"),
        ('{"tasks": {"load": {"host_us": -1}, "learn": {}}}', "host_us is -1"),
        ("[]", "JSON object"),
    ],
)
def test_costs_that_are_none_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    """Naming the file and the place."""
    (here / "odd.json").write_text(text)
    told = refused(capsys, "plan", "simulate", "plan.toml", "--costs", "odd.json")
    assert "odd.json" in told
    assert says in told


def test_files_that_are_not_there_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Costs, timelines and plans."""
    assert "gone.json" in refused(capsys, "plan", "simulate", "plan.toml", "--costs", "gone.json")
    args = ("--costs", "costs.json", "--measured", "gone.json")
    assert "gone.json" in refused(capsys, "plan", "simulate", "plan.toml", *args)
    assert "gone.toml" in refused(capsys, "plan", "auto", "gone.toml", "--costs", "costs.json")


def test_a_plan_for_other_tasks_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Naming a task that is not there."""
    told = refused_last(capsys, "plan", "check", "plan.toml", "--workload", "my_loop:short")
    assert "my_loop:short" in told
    PipelinePlan.from_dict({"schedule": {"lode": {}}}).save(here / "other.toml")
    told = refused_last(capsys, "plan", "check", "other.toml", "--workload", "my_loop:loop")
    assert "'lode'" in told


def test_limits_that_admit_no_plan_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A frozen task that is unknown; no threads at all."""
    told = refused(capsys, "plan", "auto", "plan.toml", "--costs", "costs.json", "--frozen", "gone")
    assert "'gone'" in told
