"""Files that tasks write by path are as they were before the tasks ran on trial."""

# ruff: noqa: PTH103, PTH104, PTH105, PTH123
from __future__ import annotations

import builtins
import io
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe._state import written_files
from swpipe.core.errors import UnsavedStateError
from swpipe.inference import record
from swpipe.profiler import TaskProfiler, measure_costs, measure_slopes, try_plans

Write = Callable[[Path], object]


def append(folder: Path) -> None:
    """A line of a log."""
    with open(folder / "log.txt", "a") as file:
        file.write("next\n")


def save_aside(folder: Path) -> None:
    """Write another file, and put it in the place of the one before."""
    (folder / "new.txt").write_text("saved")
    os.replace(folder / "new.txt", folder / "log.txt")


def make_folder(folder: Path) -> None:
    """With a file in it, written by torch in C++."""
    (folder / "more" / "and more").mkdir(parents=True, exist_ok=True)
    torch.save({"a": torch.ones(1)}, folder / "more" / "and more" / "last.pt")


def make_and_remove_folder(folder: Path) -> None:
    """A folder of its own."""
    os.makedirs(folder / "made")
    np.save(folder / "made" / "array.npy", np.ones(1))
    shutil.rmtree(folder / "made")


def append_to_log(folder: Path) -> None:
    """Through a handler that opened the file before."""
    HANDLER.emit(logging.makeLogRecord({"msg": "next"}))
    HANDLER.flush()


WRITES: list[Write] = [
    append,
    append_to_log,
    lambda folder: open(folder / "new.txt", "w").close(),
    lambda folder: (folder / "log.txt").write_text("other"),
    lambda folder: (folder / "log.txt").rename(folder / "moved.txt"),
    lambda folder: (folder / "log.txt").unlink(missing_ok=True),
    lambda folder: (folder / "touched.txt").touch(),
    lambda folder: np.savetxt(str(folder / "log.txt"), np.ones(2)),
    lambda folder: torch.save(torch.ones(1), str(folder / "log.txt")),
    save_aside,
    make_folder,
    make_and_remove_folder,
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with one file, to which a handler of ``logging`` writes."""
    global HANDLER
    (tmp_path / "log.txt").write_text("begun\n")
    HANDLER = logging.FileHandler(tmp_path / "log.txt")
    yield tmp_path
    HANDLER.close()


HANDLER: logging.FileHandler


def content(folder: Path) -> dict[str, str]:
    """The files and folders in a folder."""
    found = sorted(folder.rglob("*"))
    return {str(one): one.read_text("latin1") if one.is_file() else "" for one in found}


@pytest.mark.parametrize("write", WRITES)
def test_what_a_task_writes_is_taken_back(write: Write, folder: Path) -> None:
    """Files get their content back, new ones are gone."""
    before = content(folder)
    task = PipelineTask("write", lambda ctx: write(folder))
    record([task], None, device="cpu", iterations=1)
    assert content(folder) == before


def test_a_log_goes_on_where_it_was(folder: Path) -> None:
    """Whatever position the handler's file had come to."""
    HANDLER.close()
    log = logging.FileHandler(folder / "log.txt", mode="w", delay=True)

    def emit(ctx: Any) -> None:
        log.emit(logging.makeLogRecord({"msg": f"line {ctx.iter_idx}"}))

    record([PipelineTask("log", emit)], None, device="cpu")
    log.emit(logging.makeLogRecord({"msg": "first"}))
    log.close()
    assert (folder / "log.txt").read_text() == "first\n"


def _profile(pipe: SWPipeline[Any]) -> object:
    return TaskProfiler(pipe).profile(0, num_warmup=1, num_measure=1, num_rounds=2)


def _try(pipe: SWPipeline[Any]) -> object:
    return try_plans(pipe.tasks, {"a": pipe.plan, "b": pipe.plan}, [0, 1], 1, 1, device="cpu")


@pytest.mark.parametrize(
    "run",
    [
        lambda pipe: record(pipe.tasks, 0, device="cpu"),
        lambda pipe: measure_costs(pipe, [0, 1], num_warmup=1, num_measure=1),
        lambda pipe: measure_slopes(pipe, 0, num_warmup=1, num_measure=1, num_rounds=2),
        _profile,
        _try,
    ],
    ids=["record", "costs", "slopes", "profile", "try"],
)
def test_no_trial_leaves_anything(run: Callable[[SWPipeline[Any]], object], folder: Path) -> None:
    """Wherever tasks run on trial, also on a thread of their own."""
    before = content(folder)
    first = PipelineTask("first", lambda ctx: setattr(ctx, "x", 1))
    tasks = [first, PipelineTask("append", lambda ctx: append(folder))]
    alone = {"first": TaskSchedule(), "append": TaskSchedule(thread_group="io")}
    plan = PipelinePlan(alone, deps=[("append", "first")])
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        run(pipe)
    assert content(folder) == before
    assert (builtins.open, io.open) == (written_files._ORIGINAL[0],) * 2


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: (folder / "log.txt").write_text("other"),
        lambda folder: shutil.rmtree(folder),
        lambda folder: os.rename(folder, folder.with_name("elsewhere")),
    ],
    ids=["a large file", "a folder", "a folder that is moved"],
)
def test_what_cannot_be_taken_back_is_refused(
    write: Write, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is overwritten; what is only added to a large file is cut off."""
    monkeypatch.setattr(written_files, "MAX_CONTENT", 1)
    before = content(folder)
    with pytest.raises(UnsavedStateError, match=f"{folder}.*in the loop's body"):
        record([PipelineTask("write", lambda ctx: write(folder))], None, device="cpu")
    record([PipelineTask("append", lambda ctx: append(folder))], None, device="cpu")
    assert content(folder) == before


def test_a_file_that_stays_open_is_told(folder: Path) -> None:
    """Its owner goes on writing to it."""
    opened: list[Any] = []
    keep = type("Keep", (), {"__module__": "numpy", "add": staticmethod(opened.append)})()
    path = folder / "new.txt"
    task = PipelineTask("open", lambda ctx: keep.add(open(path, "w")))  # noqa: SIM115
    with pytest.warns(RuntimeWarning, match=f"keeps {path} open"):
        record([task], None, device="cpu", state=[torch.Generator()])
    for file in opened:
        file.close()


def test_what_others_write_meanwhile_stays(folder: Path) -> None:
    """In a thread that runs no task, and through ``tempfile``."""

    def task(ctx: Any) -> None:
        other = threading.Thread(target=lambda: (folder / "others.txt").write_text("kept"))
        other.start()
        other.join()
        tempfile.mkdtemp("temporary", dir=folder)

    record([PipelineTask("wait", task)], None, device="cpu", iterations=1)
    assert (folder / "others.txt").read_text() == "kept"
    assert len(list(folder.glob("*temporary"))) == 1
