"""HSTU's schedule as data: in a mapping, in JSON, in a file, in the environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swpipe.plans.torchrec.hstu_config import HSTUConfig, hstu_config
from swpipe.plans.torchrec.hstu_schedule import TASKS
from swpipe.schedulable import SameProgressSyncSide, Task
from swpipe.tasks.torchrec.hstu import HSTUPipeline
from tests.tasks.torchrec.hstu.training import CASCADE, GATED, made
from tests.tasks.torchrec.models import CPU

CPU_SIDE, GPU_SIDE, NO_SIDE = (
    SameProgressSyncSide.CPU, SameProgressSyncSide.GPU, SameProgressSyncSide.NONE,
)  # fmt: skip


def pipeline(**options: Any) -> HSTUPipeline[Any, Any]:
    """Return a pipeline for a model without sharded modules."""
    model, optimizer = made("plain")
    return HSTUPipeline(model, optimizer, CPU, prefetch=True, **options)


def tasks_of(pipe: HSTUPipeline[Any, Any]) -> dict[str, Task]:
    """Return the tasks by name."""
    return {task.name: task for task in pipe.schedule.all_tasks()}


def test_a_configuration_is_the_same_as_a_mapping_as_json_in_a_file_and_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The argument comes before the environment; without both, nothing is changed."""
    monkeypatch.delenv("HSTU_PIPELINE_CONFIG", raising=False)
    assert hstu_config(None, TASKS) == HSTUConfig()
    text = json.dumps(GATED)
    file = tmp_path / "config.json"
    file.write_text(text)
    read = [hstu_config(given, TASKS) for given in (GATED, text, file, str(file))]
    monkeypatch.setenv("HSTU_PIPELINE_CONFIG", str(file))
    read.append(hstu_config(None, TASKS))
    assert read == [read[0]] * 5
    assert read[0].thread_map == "all_noncritical_on_io"
    assert hstu_config({}, TASKS) == HSTUConfig()


def test_a_configuration_sets_lookaheads_waits_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six batches are in flight; names of recsys-examples are those of the tasks here."""
    monkeypatch.setenv("HSTU_PIPELINE_CONFIG", json.dumps(GATED))
    with pipeline() as pipe:
        tasks = tasks_of(pipe)
        plan = pipe.pipe.plan
    assert {name: tasks[name].lookahead for name in CASCADE} == CASCADE
    assert pipe.schedule.in_flight_batches == 6
    assert tasks["h2d"].same_progress_sync == (("global_tokens_allreduce", GPU_SIDE),)
    assert tasks["start_shuffle"].same_progress_sync == (("compute_output_dist", NO_SIDE),)
    assert tasks["wait_input_dist"].same_progress_sync == (("compute_output_dist", CPU_SIDE),)
    assert plan.thread_groups == ("default", "io")
    assert ("h2d", "global_tokens_allreduce") in plan.same_period_deps
    assert ("start_shuffle", "compute_output_dist") not in plan.same_period_deps
    assert ("wait_input_dist", "compute_output_dist") in plan.host_only


def test_a_task_that_is_not_there_may_be_configured() -> None:
    """A map of threads may name it as well."""
    model, optimizer = made("plain")
    with HSTUPipeline(model, optimizer, CPU, schedule_config={"lookahead": CASCADE}) as pipe:
        assert "prefetch_embeddings" not in tasks_of(pipe)
        assert pipe.schedule.in_flight_batches == 6


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"lookaheads": {}}, ValueError, "schedule_config has unknown keys lookaheads; known are"),
        ({"version": 2}, ValueError, "is of version 2: give version 1"),
        ({"lookahead": {"fwd": 1}}, ValueError, "lookahead names task 'fwd', which HSTU's step"),
        ({"lookahead": 3}, TypeError, "lookahead is 3: give an object, by task"),
        ({"lookahead": {"h2d": -1}}, ValueError, "task 'h2d': lookahead is -1: give 0"),
        ({"same_progress_sync": {"h2d": [{"task": "h2d", "side": 1}]}}, TypeError, "'sides': side"),
        ({"lookahead": {"forward": 0, "dense_forward": 0}}, ValueError, "a task is named twice"),
        ("{", ValueError, "schedule_config is no JSON"),
        (3, TypeError, "schedule_config is 3: give an object"),
        ({"thread_map": "fast"}, ValueError, "thread_map is 'fast': give one of default"),
    ],
)
def test_a_wrong_configuration_is_refused(config: Any, error: type[Exception], text: str) -> None:
    """The error has the key, the task and what to give."""
    with pytest.raises(error, match=text):
        pipeline(schedule_config=config)


def test_a_wrong_configuration_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable; threads are given in one place only."""
    monkeypatch.setenv("HSTU_PIPELINE_CONFIG", '{"version": 2}')
    with pytest.raises(ValueError, match="the environment variable HSTU_PIPELINE_CONFIG is of"):
        pipeline()
    with pytest.raises(ValueError, match="thread_map is given, and the schedule configuration"):
        pipeline(thread_map="by_stream", schedule_config={"thread_map": "default"})
