"""Calls of recsys-examples' ``SWPipeline``, as its users type them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.device import resolve
from swpipe.schedulable import Pipeline, Task


def _add(ctx: Any) -> None:
    ctx.x = ctx.batch + 1


def _double(ctx: Any) -> None:
    ctx.y = ctx.x * 2


ADD, DOUBLE = PipelineTask("add", _add), PipelineTask("double", _double)


@pytest.fixture
def pipe() -> Iterator[SWPipeline]:
    """A pipeline with two iterations in flight."""
    plan = PipelinePlan(
        schedule={ADD: TaskSchedule(stage=0), DOUBLE: TaskSchedule(stage=1)},
        deps=[(DOUBLE, ADD)],
        pipeline_depth=2,
    )
    with SWPipeline(plan, device="cpu") as made:
        yield made


def test_a_task_has_the_hash_of_its_name() -> None:
    """Two tasks of one name with other functions are not equal, or one would be lost."""
    other = PipelineTask("add", _double)
    assert hash(ADD) == hash(other) == hash("add")
    assert PipelineTask("add", _add, pure=True) == ADD
    assert other != ADD
    assert len({ADD: 1, other: 2}) == 2


def test_a_list_fills_the_pipeline_and_progress_goes_on_with_it(pipe: SWPipeline) -> None:
    """It continues to the end; then a call without an iterator is an error."""
    with pytest.raises(TypeError, match=r"call fill_pipeline\(loader\) first"):
        pipe.progress()
    pipe.fill_pipeline([1, 2, 3])
    assert [pipe.progress().y for _ in range(3)] == [4, 6, 8]
    with pytest.raises((StopIteration, TypeError)):
        pipe.progress()
    pipe.progress(iter([4]))
    with pytest.raises(StopIteration):
        pipe.progress()


def test_progress_goes_on_with_the_iterator_of_the_call_before(pipe: SWPipeline) -> None:
    """The end of its data is a StopIteration; pushed batches have no iterator."""
    assert pipe.progress(iter(range(3))).y == 2
    assert pipe.progress().y == 4
    assert pipe.progress().y == 6
    pipe.push(1)
    with pytest.raises(TypeError, match="no iterator to continue with"):
        pipe.progress()


def test_a_run_is_its_seconds(pipe: SWPipeline) -> None:
    """A run converts to a number of seconds."""
    report = pipe.run([1, 2])
    assert float(report) == report.seconds


def test_the_schedule_is_printed(pipe: SWPipeline, capsys: pytest.CaptureFixture[str]) -> None:
    """Both printing methods print their texts."""
    pipe.print_schedule(4)
    assert capsys.readouterr().out == pipe.format_schedule(4) + "\n"
    pipe.print_stage_analysis()
    assert capsys.readouterr().out == pipe.format_stage_analysis() + "\n"


def test_a_number_is_a_device_of_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is as in torch; a truth value is no device."""
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: None)
    with pytest.raises(ValueError, match="device 'cuda:0' is not on this machine"):
        resolve(0)
    with pytest.raises(ValueError, match="device is True"):
        resolve(True)


def test_a_list_of_tasks_has_the_streams_that_they_name() -> None:
    """It is given as in the schedulable engine, ``Pipeline(tasks=[...])``."""
    seen: list[Any] = []
    tasks = [
        Task.from_fn("copy", lambda ctx: ctx.slots.set("x", 1), stream="memcpy", writes=("x",)),
        Task.from_fn("sum", lambda ctx: seen.append(ctx.slots["x"]), reads=("x",)),
    ]
    with Pipeline(tasks=tasks) as pipe:
        pipe.step(None)
    assert seen == [1]
