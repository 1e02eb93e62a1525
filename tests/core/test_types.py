"""What a type checker sees: ``mypy --strict`` over small programs of a user."""

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
    assert_type(pipe.flush(), list[Ctx])
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


PROGRAMS = {"typed": TYPED, "free": FREE, "misspelt": MISSPELT}


@pytest.fixture(scope="module", name="errors")
def errors_by_line(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What ``mypy --strict`` reports of each program: line to message."""
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
    """Read or set, in a task and outside, with its line."""
    marked = [n for n, line in enumerate(MISSPELT.splitlines(), 1) if line.endswith("# here")]
    assert sorted(errors["misspelt"]) == marked
    assert all('"Ctx" has no attribute "lsos"' in each for each in errors["misspelt"].values())
