"""The periods and threads of HSTU's tasks; a prefetch comes after the forward."""

from __future__ import annotations

from typing import Any

import pytest

from swpipe import PipelinePlan, PipelineTask
from swpipe.analysis.verification import verify_for_run
from swpipe.plans.torchrec.hstu_config import hstu_config
from swpipe.plans.torchrec.hstu_schedule import (
    HSTU_DEFAULT_THREAD_MAP,
    HSTU_THREAD_MAPS,
    TASKS,
    StepTask,
    hstu_plan,
    hstu_schedule,
)
from swpipe.schedulable import Schedule, ScheduleValidationError
from swpipe.tasks.torchrec import PerToken, SparseDistTasks, TaskOptions, TrainStep
from swpipe.tasks.torchrec.hstu import hstu_groups
from tests.support.pairs import pairwise_cases
from tests.support.ranks import Ranks
from tests.tasks.torchrec.hstu.training import CASCADE, made
from tests.tasks.torchrec.models import CPU

PREFETCH = "prefetch_embeddings"
ALWAYS = (
    "start_input_dist", "global_tokens_allreduce", "wait_input_dist", "compute_output_dist",
    "dense_forward", "backward", "finalize_model_grads",
)  # fmt: skip
"""The tasks that communicate, in order."""

# ------------------------------------------------------------------------------- declarations


def _schedule(prefetch: bool = True, depth: int = 1, shuffled: bool = False) -> Schedule:
    return hstu_schedule(prefetch=prefetch, prefetch_depth=depth, shuffled=shuffled)


@pytest.mark.parametrize(("prefetch", "depth"), [(False, 1), (True, 1), (True, 3)])
def test_the_lookaheads_follow_the_depth(prefetch: bool, depth: int) -> None:
    """Copy and shuffles have K + 1, the exchange of ids K, prefetch 1, all others 0."""
    schedule = _schedule(prefetch, depth)
    found = {task.name: task.lookahead for task in schedule.all_tasks()}
    wanted = dict.fromkeys(TASKS, 0) | dict.fromkeys(TASKS[:3], depth + 1)
    wanted |= {"start_input_dist": depth, "wait_input_dist": depth, PREFETCH: 1}
    if not prefetch:
        del wanted[PREFETCH]
    assert found == wanted
    assert schedule.in_flight_batches == depth + 2


@pytest.mark.parametrize("shuffled", [False, True])
def test_who_takes_turns_among_the_collectives(shuffled: bool) -> None:
    """Seven always do, both shuffles if a shuffler exchanges rows."""
    found = {task.name for task in _schedule(shuffled=shuffled).all_tasks() if task.nccl}
    assert found == {*ALWAYS, *(("start_shuffle", "finish_shuffle") if shuffled else ())}


def test_tokens_are_counted_while_the_sizes_of_the_next_batch_are_exchanged() -> None:
    """Under every preset all take turns in this order, in which nothing waits for the sizes."""
    for preset in (*HSTU_THREAD_MAPS, "per_task"):
        schedule = hstu_plan(_schedule(), preset).schedule
        assert tuple(name for name in schedule if schedule[name].globally_ordered) == ALWAYS


def test_the_presets_are_those_of_the_seed() -> None:
    """There are five, by name, and one of recsys-examples; tasks not ahead are the caller's."""
    threads = {name: hstu_plan(_schedule(), name).thread_groups for name in HSTU_THREAD_MAPS}
    assert threads == {
        "default": ("default", "io"),
        "by_stream": ("default", "memcpy", "data_dist", "prefetch"),
        "io_prefetch_compute": ("default", "io", "prefetch"),
        "io_data_dist_compute": ("default", "io", "data_dist"),
        "io_data_dist_prefetch_compute": ("default", "io", "data_dist", "prefetch"),
        "all_noncritical_on_io": ("default", "io"),
    }
    assert hstu_plan(_schedule(), None) == hstu_plan(_schedule(), "default")
    assert {*HSTU_DEFAULT_THREAD_MAP} == {*TASKS}
    assert HSTU_DEFAULT_THREAD_MAP["dense_forward"] == "compute"
    ahead = [
        name for name, thread in HSTU_THREAD_MAPS["all_noncritical_on_io"].items() if thread == "io"
    ]
    assert ahead == [*TASKS[:6]]
    assert hstu_plan(_schedule(), None).within_calls
    assert hstu_plan(_schedule(), "by_stream", threaded=False).thread_groups == ("default",)


def test_other_maps_of_threads() -> None:
    """A dict may name a task that is left out; all other tasks exist in every schedule."""
    plain = _schedule(prefetch=False)
    own = {**dict.fromkeys(TASKS, "default"), PREFETCH: "cache", "h2d": "copies"}
    assert hstu_plan(plain, own).thread_groups == ("default", "copies")
    assert hstu_plan(_schedule(), own).thread_groups == ("default", "copies", "cache")
    plan = hstu_plan(plain, {"forward": "io", "ranking_embedding_forward": "look"})
    assert plan.schedule["dense_forward"].thread_group == "io"
    assert plan.schedule["compute_output_dist"].thread_group == "look"
    with pytest.raises(ValueError, match="named twice \\('forward' is 'dense_forward'\\)"):
        hstu_plan(plain, {"forward": "io", "dense_forward": "compute"})


def test_wrong_maps_and_depths_are_refused() -> None:
    """The error has the value and what to give; a declaration alone does not run."""
    with pytest.raises(ScheduleValidationError, match="thread_map names task 'fwd'"):
        hstu_plan(_schedule(), {"fwd": "io"})
    with pytest.raises(ValueError, match="thread_map is 'fast': give one of default, by_stream"):
        hstu_plan(_schedule(), "fast")
    with pytest.raises(TypeError, match="thread_map is 3"):
        hstu_plan(_schedule(), 3)  # type: ignore[arg-type]
    for depth in (0, 1.5, True):
        with pytest.raises(ValueError, match="give batches, 1 or more"):
            _schedule(depth=depth)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="HSTUPipeline has its function"):
        StepTask("backward").run(None)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- verification


def _unproved(tasks: tuple[PipelineTask, ...], plan: PipelinePlan) -> list[str]:
    """Return the kinds of devices on which a plan is not proved by declarations alone."""
    return [
        f"with streams={streams}"
        for streams in (False, True)
        if not verify_for_run(
            plan, tasks, None, device="cpu", streams=streams
        ).proved_by_declarations()
    ]


def _step_tasks(prefetch: bool, model: Any = None, optimizer: Any = None) -> SparseDistTasks:
    if model is None:
        model, optimizer = made()
    options = TaskOptions(forward="ahead", find="direct", grouped=hstu_groups(prefetch))
    step = TrainStep([optimizer], per_token=PerToken())
    return SparseDistTasks(model, step, options, device=CPU)


def _all_plans() -> list[str]:
    found = []
    for prefetch in (False, True):
        tasks = _step_tasks(prefetch).tasks()
        for depth, preset in pairwise_cases((1, 2, 3), (*HSTU_THREAD_MAPS, "per_task")):
            if prefetch or depth == 1:
                plan = hstu_plan(_schedule(prefetch, depth), preset)
                found += [f"{prefetch}, {depth}, {preset}: {w}" for w in _unproved(tasks, plan)]
        cascade = hstu_schedule(
            prefetch=prefetch, prefetch_depth=1, shuffled=True,
            changes=hstu_config({"lookahead": CASCADE}, TASKS).fields,
        )  # fmt: skip
        plan = hstu_plan(cascade, "all_noncritical_on_io")
        found += [f"{prefetch}, the cascade: {w}" for w in _unproved(tasks, plan)]
    return found


def test_every_plan_is_proved_by_what_the_tasks_declare(one_rank: Ranks) -> None:
    """This is with and without streams, at every depth, with every preset, with six in flight."""
    assert one_rank.run(_all_plans) == [[]]


def test_a_prefetch_runs_between_forward_and_backward() -> None:
    """It waits for one, and the other waits for it, for any batches."""
    pairs = {(PREFETCH, "dense_forward"), ("backward", PREFETCH)}
    assert pairs <= {*hstu_plan(_schedule(), None).same_period_deps}
