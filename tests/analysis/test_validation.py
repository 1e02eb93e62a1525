"""Plans that cannot run are refused before the first batch: all problems at once, with the grid."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from swpipe import PipelinePlan, StreamSpec, TaskSchedule
from swpipe.analysis.validation import validate
from swpipe.errors import PlanError
from tests.support.plans_for_tests import piped, task, tasks

A_B = {"a": TaskSchedule(), "b": TaskSchedule()}
LATE_B = {"a": TaskSchedule(), "b": TaskSchedule(stage=2)}
SECOND = torch.Stream(stream_id=0, device_index=1, device_type=1)


def one(**fields: Any) -> dict[str, TaskSchedule]:
    """Return a schedule of task "a" alone."""
    return {"a": TaskSchedule(**fields)}


class Refused(NamedTuple):
    """A case: the fields of a plan, its tasks, and words of the refusal."""

    says: tuple[str, ...]
    plan: dict[str, Any]
    device: str = "cpu"


REFUSED = {
    "an empty plan": Refused(("the plan is empty",), {"schedule": {}}),
    **{
        f"stage {stage!r}": Refused(
            (f"task 'a': stage is {stage!r}",), {"schedule": one(stage=stage)}
        )
        for stage in (-1, 1.5, "0", True)
    },
    **{
        f"depth {depth}": Refused(
            (f"pipeline_depth is {depth}, but stage 1 of 'a' needs 2",),
            {"schedule": one(stage=1), "pipeline_depth": depth},
        )
        for depth in (0, 1, -3)
    },
    "a future read, with both mends, and marked in the grid": Refused(
        (
            "future read: a after b (deps)",
            "move 'a' to stage 2 or later, or 'b' to stage 0 or earlier",
            "a [default]  0!  1!  2!",
        ),
        {"schedule": LATE_B, "deps": [("a", "b")]},
    ),
    "a future read over iterations": Refused(
        ("future read",), {"schedule": LATE_B, "cross_iter_deps": [("a", "b", 1)]}
    ),
    "a cycle within a period": Refused(
        (
            "within an iteration form a cycle: 'a' after 'b' after 'a'; none of these",
            "take out one of a after b (deps), b after a (same_period_deps)\n",
        ),
        {
            "schedule": {**A_B, "c": TaskSchedule()},
            "deps": [("a", "b"), ("c", "a")],
            "same_period_deps": [("b", "a")],
        },
    ),
    "a cycle that no single iteration has": Refused(
        ("within a period form a cycle: 'a' after 'b' after 'a'",),
        {
            "schedule": {"a": TaskSchedule(), "b": TaskSchedule(stage=1)},
            "cross_iter_deps": [("a", "b")],
            "same_period_deps": [("b", "a")],
        },
    ),
    "the shortest cycle": Refused(("'a' after 'a'",), {"schedule": A_B, "deps": [("a", "a")]}),
    "an order against the dependences": Refused(
        ("order contradicts the dependences",),
        {"schedule": A_B, "deps": [("b", "a")], "order": ["b", "a"]},
    ),
    "names that the schedule lacks, wherever they stand": Refused(
        (
            *(f"names {name!r}, which the schedule does not have" for name in "xyzw"),
            "order names 'a' 2 times",
        ),
        {
            "schedule": A_B,
            "deps": [("a", "x")],
            "cross_iter_deps": [("y", "a")],
            "same_period_deps": [("a", "z")],
            "order": ["a", "w", "a"],
        },
    ),
    "streams of another device, without a name, or not used": Refused(
        (
            "task 'a': its stream belongs to cpu",
            "task 'b': stream is ''",
            "streams has 'memcpi', but no task names it",
            "stream 'odd': its description is 3",
        ),
        {
            "schedule": {
                "a": TaskSchedule(stream=torch.Stream(device="cpu")),
                "b": TaskSchedule(stream=""),
            },
            "streams": {"memcpi": StreamSpec(priority=-1), "odd": 3},
        },
        "cuda",
    ),
    "a stream of another device of the same kind": Refused(
        ("task 'a': its stream belongs to cuda:1, unknown to the pipeline's device (cuda:0)",),
        {"schedule": one(stream=SECOND)},
        "cuda:0",
    ),
    **{
        f"stream {stream}, which no set can hold": Refused(
            (f"task 'a': stream is {stream!r}; give a name",),
            {"schedule": one(stream=stream), "streams": {"s": StreamSpec()}},
        )
        for stream in (["memcpy"], {"memcpy": 1}, 7)
    },
    "a thread group without a name": Refused(
        ("task 'a': thread_group is ''",), {"schedule": one(thread_group="")}
    ),
    "problems of different kinds, numbered": Refused(
        ("3 problems", "  3. "),
        {"schedule": one(stage=-1), "deps": [("a", "x")], "pipeline_depth": -1},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused(name: str) -> None:
    """The error lists all that is wrong."""
    refused = REFUSED[name]
    plan = PipelinePlan(**refused.plan)
    with pytest.raises(PlanError) as caught:
        validate(plan, [task(name) for name in plan.schedule], refused.device)
    assert [said for said in refused.says if said not in str(caught.value)] == []


def test_what_can_run_passes() -> None:
    """These are the example; a lag of 0 across iterations; and a stream on a device that fits."""
    validate(piped(), tasks())
    schedule = {"a": TaskSchedule(), "b": TaskSchedule(stage=1)}
    validate(PipelinePlan(schedule, cross_iter_deps=[("a", "b", 1)]), [task("a"), task("b")])
    for device in ("cuda:1", "cuda"):
        validate(PipelinePlan(one(stream=SECOND)), [task("a")], device)


def test_tasks_and_schedule_must_name_the_same() -> None:
    """Duplicates, tasks or schedules without the other, and other objects are errors."""
    with pytest.raises(PlanError) as caught:
        validate(PipelinePlan(A_B), [task(name) for name in "aac"])
    for said in (
        "task 'a' is given 2 times",
        "task 'c' has no schedule",
        "schedules 'b', which is not among the tasks (a, a, c)",
    ):
        assert said in str(caught.value)
    with pytest.raises(
        PlanError, match=r"tasks has <built-in .*write PipelineTask\(name, function"
    ):
        validate(PipelinePlan(one()), [task("a"), print])  # type: ignore[list-item]
