"""The view of a type checker: ``mypy --strict`` over small programs of a user."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import swpipe

pytest.importorskip("mypy")

ROOT = Path(swpipe.__file__).parents[1]

CONFIG = """\
[mypy]
strict = true
[mypy-swpipe.*]
follow_imports = silent
[mypy-torch.*]
follow_imports = skip
"""

HEAD = """\
from typing import assert_type
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskProfiler
from swpipe import TypedContext, task
from swpipe.inference import record

class Ctx(TypedContext):
    x: int
    loss: float

    def half(self) -> float:
        return self.loss / 2

"""

TYPED = f"""{HEAD}
@task
def double(ctx: Ctx) -> None:
    ctx.x = 2 * int(ctx.batch)

@task(random=True)
def forward(ctx: Ctx) -> None:
    ctx.loss = ctx.x / 2 + ctx.iter_idx

assert_type(double, PipelineTask)
assert_type(forward, PipelineTask)
tasks = [double, forward, PipelineTask("step", lambda ctx: None)]
plan = PipelinePlan.serial(tasks)
record(tasks, 1, context=Ctx)
with SWPipeline(plan, tasks, context=Ctx) as pipe:
    assert_type(pipe, SWPipeline[Ctx])
    assert_type([ctx.half() for ctx in pipe.iterate([1, 2])], list[float])
    assert_type(pipe.progress(iter([1])), Ctx)
    assert_type(pipe.run_one_serial_iter(1), Ctx)
    assert_type(pipe.push(1), Ctx | None)
    assert_type(pipe.drain(), list[Ctx])
    assert_type([*pipe.flush()], list[Ctx])
    TaskProfiler(pipe)
"""

FREE = f"""{HEAD}
def forward(ctx: IterContext) -> None:
    ctx.loss = ctx.anything

def train(pipe: SWPipeline) -> None:
    for ctx in pipe.iterate([1, 2]):
        print(ctx.loss)

tasks = [PipelineTask("forward", forward)]
with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
    assert_type(pipe, SWPipeline[IterContext])
    train(pipe)
    TaskProfiler(pipe)
"""

MISSPELT = f"""{HEAD}
@task
def forward(ctx: Ctx) -> None:
    ctx.loss = 2 * ctx.loss
    ctx.lsos = 1.0  # here
    print(ctx.lsos)  # here

with SWPipeline(PipelinePlan.serial([forward]), [forward], context=Ctx) as pipe:
    for ctx in pipe.iterate([1, 2]):
        print(ctx.loss, ctx.lsos)  # here
    print(pipe.run_one_serial_iter(1).lsos)  # here
"""


WRONG = """\
import torch
import swpipe
from swpipe import (
    DeclaredIO, IterContext, PipelinePlan, PipelineTask, StreamSpec, SWPipeline, TaskProfiler,
    TaskSchedule, task,
)
from swpipe.inference import record
from swpipe.loops import ResumableLoop
from swpipe.planning import Limits, auto_plan
from swpipe.plans.pipeline_parallel import PipelineCosts, plan_v_schedule
from swpipe.plans.prefetch import prefetch_plan
from swpipe.schedulable import SchedulablePipeline
from swpipe.testing import assert_same_numbers

def decode(ctx: IterContext) -> None: ...
def on_batch(batch: int) -> int:
    return batch

loader = [1, 2]
tasks = [PipelineTask("decode", decode)]
plan = PipelinePlan.serial(tasks)
pipe = SWPipeline(plan, tasks)
loop = swpipe.overlap(loader, tasks)
ahead = swpipe.ahead(loader)
profiler = TaskProfiler(pipe)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())

swpipe.overlap(loader, tasks, pull_ahead="yes")  # here
swpipe.overlap(loader)  # here
swpipe.overlap(loader, [1])  # here
swpipe.overlp(loader, tasks)  # here
swpipe.overlap(loader, tasks, context=int)  # here
loop.overlap.aheads  # here
loop.pipe.runn(loader)  # here
swpipe.ahead(loader, on_batch, prefetch="3")  # here
swpipe.ahead(loader, 3)  # here
swpipe.ahead(loader, devise="cuda")  # here
for batch in ahead:
    batch.upper()  # here
PipelineTask("decode", decode, pur=True)  # here
PipelineTask("decode", decode, io=["model"])  # here
task(decode, pure="no")  # here
DeclaredIO(state="model", mode="x")  # here
TaskSchedule(stage="0")  # here
TaskSchedule(0, thread_grp="io")  # here
StreamSpec(prio=1)  # here
PipelinePlan(schedule={"a": 0})  # here
PipelinePlan(schedule={"a": TaskSchedule()}, dep=[("a", "a")])  # here
PipelinePlan.serial(3)  # here
plan.depht  # here
SWPipeline(tasks, plan)  # here
SWPipeline(plan, tasks, context=IterContext()).run(loader)  # here
pipe.run(loader, verbos=True)  # here
pipe.progress(loader)  # here
pipe.shortcut(1)  # here
profiler.profile_many(loader, num_rounds="3")  # here
swpipe.autotune(tasks, loader, second=3)  # here
swpipe.report(tasks, loader, round=3)  # here
ResumableLoop(pipe)  # here
loop.state_dict(rests=True)  # here
prefetch_plan([decode], tasks, pull_grup="io")  # here
record(tasks, loader, contxt=IterContext)  # here
auto_plan(plan, 3)  # here
Limits(in_flght=3)  # here
plan_v_schedule(2, 4, PipelineCosts(forwrd=3))  # here
SchedulablePipeline.basic(model, optimizer, prefech=True)  # here
assert_same_numbers(1)  # here
"""

PROGRAMS = {"typed": TYPED, "free": FREE, "misspelt": MISSPELT, "wrong": WRONG}


def marked(text: str) -> list[int]:
    """Return the lines at which a program is wrong."""
    return [n for n, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]


@pytest.fixture(scope="module", name="errors")
def errors_by_line(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """Return the errors of ``mypy --strict`` in each program, by line."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "mypy.ini").write_text(CONFIG)
    for name, text in PROGRAMS.items():
        (folder / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", "cache", *(f"{n}.py" for n in PROGRAMS)],
        cwd=folder,
        # An installed swpipe is found without the path, and refused on it.
        env=os.environ | ({"MYPYPATH": str(ROOT)} if "site-packages" not in ROOT.parts else {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = re.findall(r"^(\w+)\.py:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert len(lines) == done.stdout.count(": error: "), done.stdout
    return {
        name: {int(line): message for of, line, message in lines if of == name} for name in PROGRAMS
    }


@pytest.mark.parametrize("program", ["typed", "free"])
def test_a_right_program_has_no_errors(program: str, errors: dict[str, dict[int, str]]) -> None:
    """Types are inferred; contexts without a class of the user's have any attribute."""
    assert errors[program] == {}


def test_a_misspelt_attribute_is_found(errors: dict[str, dict[int, str]]) -> None:
    """It is found when read or set, in a task and outside, with its line."""
    assert sorted(errors["misspelt"]) == marked(MISSPELT)
    assert all('"Ctx" has no attribute "lsos"' in each for each in errors["misspelt"].values())


def test_each_wrong_call_is_found(errors: dict[str, dict[int, str]]) -> None:
    """These are misspelt names, wrong types and missing arguments over the public interface."""
    assert sorted(errors["wrong"]) == marked(WRONG)
    assert len(marked(WRONG)) >= 35
