"""The first commands of a new user: the demo with torch alone, and a loop of their own."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from swpipe import IterContext, PipelineTask, TypedContext
from swpipe.cli import app
from swpipe.profiler import ProfileResults
from swpipe.tasks import images
from tests.cli.test_cli import needs_matplotlib, out, refused
from tests.docs.pages import ROOT
from tests.profiler.test_result import RESULT


class Typed(TypedContext):
    loss: torch.Tensor


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Create a module ``my_loop`` with loops; return a list that grows with each call."""
    calls: list[int] = []

    def loop(batches: Any = (1.0, 2.0, 3.0) * 8, log: bool = True) -> tuple[Any, ...]:
        calls.append(1)
        weight = torch.ones(1, requires_grad=True)

        def train(ctx: IterContext) -> None:
            (weight * ctx.x).backward()
            with torch.no_grad():
                weight.sub_(0.01 * weight.grad)
            if log:
                ctx.loss = weight.detach() * 1

        decode = PipelineTask("decode", lambda ctx: setattr(ctx, "x", ctx.batch * 2), pure=True)
        return [decode, PipelineTask("train", train)], batches

    module: Any = ModuleType("my_loop")
    module.loop = loop
    module.typed = lambda: (*loop(), Typed)
    module.endless = lambda: loop(iter([1.0] * 5))
    module.empty = lambda: loop([])
    module.silent = lambda: loop(log=False)
    monkeypatch.setitem(sys.modules, "my_loop", module)
    return calls


@pytest.mark.parametrize("name", ["loop", "typed"])
def test_train_trains_a_loop_of_ones_own(
    capsys: pytest.CaptureFixture[str], own: list[int], tmp_path: Path, name: str
) -> None:
    """It trains once through the data under each plan; it prints speeds, losses and differences."""
    timeline = tmp_path / "new" / "timeline.json"
    args = ("--workload", f"my_loop:{name}", "--compare", "serial,serial", "--timeline", timeline)
    said = out(capsys, "train", *args)
    assert re.search(r"^serial +24 .* 0\.\d+ to -?\d+\.\d+$", said, re.MULTILINE)
    assert re.search(r"^serial and serial: bit-equal: 24 losses$", said, re.MULTILINE)
    assert len(own) == 3  # one for the plan, and one for each run
    assert timeline.exists()


def test_train_makes_a_plan_for_a_loop_of_ones_own(
    capsys: pytest.CaptureFixture[str], own: list[int]
) -> None:
    """``auto`` is compared with the serial plan."""
    args = ("--workload", "my_loop:loop", "--compare", "serial,auto", "--steps", 6)
    said = out(capsys, "train", *args)
    assert "auto over serial: " in said
    assert "bit-equal: 6 losses" in said
    assert "auto: expected " in said


def test_train_tells_what_a_loop_of_ones_own_lacks(
    capsys: pytest.CaptureFixture[str], own: list[int]
) -> None:
    """A length and a batch are required; a loss is optional."""
    told = refused(capsys, "train", "--workload", "my_loop:endless")
    assert "--steps is missing: the batches of my_loop:endless have no length" in told
    told = refused(capsys, "train", "--workload", "my_loop:empty", "--steps", 3)
    assert "plan serial: the workload has no batch to train on" in told
    args = ("--workload", "my_loop:silent", "--compare", "serial,serial")
    assert "no ctx.loss to compare" in out(capsys, "train", *args)


@pytest.fixture
def quick_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw few images, and measure no task."""
    result = ProfileResults([RESULT])
    monkeypatch.setattr(app, "profile_job", lambda *given, **options: result)
    monkeypatch.setattr(images, "_DIFFERENT", 4)


@pytest.mark.usefixtures("quick_demo")
def test_the_demo_runs_with_torch_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains on generated images, with a falling loss, and says how to get the pictures."""
    monkeypatch.setattr(app, "find_spec", lambda name: None)
    said = out(capsys, "demo", "--directory", tmp_path, "--steps", 40)
    assert "Training the same model (images) under two plans, in turns: serial, pipelined." in said
    assert "serial and pipelined: bit-equal: 40 losses\n" in said
    lines = said.split("files:\n")[1].splitlines()
    files = [Path(line.strip()) for line in lines if line.startswith(" ")]
    assert [file.name for file in files] == [*app.DEMO_FILES]
    assert all(file.stat().st_size > 0 for file in files)
    assert lines[len(files) :] == ["no pictures: they need matplotlib: pip install 'swpipe[plot]'"]
    first, last = map(float, re.findall(r"(\d\.\d+) to (\d\.\d+)$", said, re.MULTILINE)[0])
    assert last < first / 2
    # The table comes before what takes longer.
    assert said.index("bit-equal") < said.index("What each task costs, plain loop.")
    assert said.index("plain loop") < said.index("What each task costs, under the plan.")


@needs_matplotlib
@pytest.mark.usefixtures("quick_demo")
def test_the_demo_draws_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They show its timeline and its table, and are next to the other files."""
    out(capsys, "demo", "--directory", tmp_path, "--steps", 4)
    written = {file.name for file in tmp_path.iterdir() if file.stat().st_size > 0}
    assert written >= {*app.DEMO_FILES, *app.DEMO_PICTURES}


def test_a_package_index_can_show_the_readme() -> None:
    """It has no picture and no link to a file, which would be broken there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)|<img ", text) == []
    paths = re.findall(r"`(docs/[\w/.-]+)`", text)
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
