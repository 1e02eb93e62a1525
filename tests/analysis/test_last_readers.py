"""Attributes are deleted at the first place after all their users, in every interleaving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from swpipe import PipelinePlan, PipelineTask, TaskSchedule
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.last_readers import releases_of, users_of, uses_of
from swpipe.analysis.memory import bytes_in_flight
from swpipe.core.effects import Effects, Location
from swpipe.core.resolved import resolve_plan
from swpipe.core.task_memory import KEPT, Block, TaskMemory
from tests.support.plans_for_tests import going

USES = {
    "load": ["batch"],
    "left": ["x"],
    "right": ["x", "y"],
    "join": ["l", "r"],
    "log": ["loss"],
}
DEPS = [("left", "load"), ("right", "load"), ("join", "left"), ("join", "right"), ("log", "join")]


def plan(
    stages: Sequence[int] = (0, 1, 1, 2, 2), groups: str = "abccc", streams: str = "-----"
) -> PipelinePlan:
    """Return a plan on thread groups and streams of one letter: "c" and "-" are the caller's."""
    entries = {
        name: TaskSchedule(
            stage,
            stream=None if stream == "-" else stream,
            thread_group="default" if group == "c" else group,
        )
        for name, stage, group, stream in zip(USES, stages, groups, streams, strict=True)
    }
    return PipelinePlan(entries, deps=DEPS, pipeline_depth=4, keep=["loss"])


def uses(**changed: Sequence[str] | None) -> Mapping[str, frozenset[str] | None]:
    """Return the attributes that the tasks use."""
    said = {**USES, **changed}
    return {name: None if names is None else frozenset(names) for name, names in said.items()}


def places(
    of: PipelinePlan, *, streams: bool = False, **changed: Sequence[str] | None
) -> dict[str, str]:
    """Return, for each attribute, the task at which it is deleted."""
    before = HappensBefore.of(resolve_plan(of), streams=streams)
    return {} if of.keep is None else going(before, uses(**changed), of.keep)


def test_a_value_goes_after_its_last_user() -> None:
    """The last user may be on any thread, if the other users come before it."""
    assert places(plan()) == {
        "batch": "load",
        "x": "join",  # left and right run at the same time: the first task after both
        "y": "right",
        "l": "join",
        "r": "join",
    }
    assert places(plan(groups="accc" + "c"))["x"] == "right"


def test_a_task_that_says_nothing_uses_all() -> None:
    """A value in ``keep`` is not freed, no matter which task uses it."""
    found = places(plan(), join=None)
    assert found == {"batch": "join", "x": "join", "y": "join"}


def test_what_nobody_comes_after_goes_at_the_end_of_the_iteration() -> None:
    """Two threads are its last users, at the same time."""
    apart = plan(stages=(0, 1, 1, 1, 1), groups="abccc")
    found = places(apart, join=["r"], log=["loss"], left=["x", "q"], right=["x", "y", "q"])
    assert found["q"] == "join"  # which waits for both, though it does not use it
    ends = PipelinePlan(
        {
            "load": TaskSchedule(0),
            "left": TaskSchedule(1, thread_group="b"),
            "right": TaskSchedule(1),
        },
        deps=[("left", "load"), ("right", "load")],
        keep=[],
    )
    said = {"load": frozenset({"batch"}), "left": frozenset("x"), "right": frozenset("x")}
    before = HappensBefore.of(resolve_plan(ends), streams=False)
    assert going(before, said, ends.keep or ()) == {"batch": "load", "x": "<retire>"}


def test_device_work_is_waited_for_where_there_are_streams() -> None:
    """The wait covers all tasks before it whose work is not known to be done."""
    of = plan(groups="ccccc", streams="sus--")

    def behind(*, streams: bool) -> dict[str, tuple[str, ...]]:
        before = HappensBefore.of(resolve_plan(of), streams=streams)
        found = releases_of(before, uses(), ["loss"])
        return {
            name: one.behind for each in found.at.values() for one in each for name in one.names
        }

    assert behind(streams=True)["batch"] == ("load",)
    assert behind(streams=True)["y"] == ("left", "right")
    assert behind(streams=True)["l"] == ("join",)
    assert set(behind(streams=False).values()) == {()}


def test_on_one_stream_nothing_waits() -> None:
    """Memory is used again in the order of the stream."""
    before = HappensBefore.of(resolve_plan(plan()), streams=True)
    found = releases_of(before, uses(), ["loss"])
    assert {one.behind for each in found.at.values() for one in each} == {()}


# ------------------------------------------------------------------ who uses what


def test_tasks_use_what_they_say_and_what_was_recorded() -> None:
    """Both are joined where both exist; without either, nothing is known."""
    tasks = [
        PipelineTask("both", print, reads=["a"]),
        PipelineTask("said", print, reads=[]),
        PipelineTask("recorded", print),
        PipelineTask("neither", print),
    ]
    there = frozenset({Location("b", False)}), frozenset({Location("c", False)})
    effects = {"both": Effects(*there), "recorded": Effects(*there)}
    assert uses_of(tasks, effects) == {
        "both": {"a", "b", "c"},
        "said": set(),
        "recorded": {"b", "c"},
        "neither": None,
    }


def test_a_table_of_states_alone_says_nothing_of_attributes() -> None:
    """A table of declared states does not, for example."""
    states = Effects(frozenset({Location("model", True)}), frozenset())
    forward = PipelineTask("forward", print)
    assert uses_of([forward], {"forward": states}) == {"forward": None}


# ------------------------------------------------------------------ bytes in flight


@pytest.mark.parametrize(
    ("of", "streams", "copies"),
    [
        (plan(groups="ccccc"), False, 1),
        (plan(groups="ccccc"), True, 1),
        (plan(groups="ccccc", streams="s----"), False, 1),
        (plan(groups="ccccc", streams="s----"), True, 2),  # one more waits for the device
    ],
    ids=["host", "one stream", "streams, on a CPU", "streams"],
)
def test_a_value_counts_until_it_goes(of: PipelinePlan, streams: bool, copies: int) -> None:
    """On streams it counts in one more iteration."""
    goes = Block("load", KEPT, 8, "x", users=users_of(uses())["x"])
    (held,) = bytes_in_flight(
        HappensBefore.of(resolve_plan(of), streams=streams), TaskMemory((goes,))
    ).held
    assert held.copies == copies
    stays = TaskMemory((Block("load", KEPT, 8, "loss"),))
    (kept,) = bytes_in_flight(HappensBefore.of(resolve_plan(of), streams=streams), stays).held
    assert kept.copies == (5 if streams and of.names_streams else 3)  # depth, run_ahead
