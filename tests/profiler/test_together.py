"""Which tasks are shortcut together."""

from __future__ import annotations

import pytest

from swpipe.profiler.figures import busy_s, limiting
from swpipe.profiler.profiler import joint_kinds
from tests.profiler.sleepers import overlapped

PLAN = overlapped({"io": ["read", "decode"], "copies": ["copy"], "default": ["train", "step"]})
NAMES = ("read", "decode", "copy", "train", "step")


def kinds(*host_s: float, step_s: float = 10.0) -> dict[tuple[str, ...], str]:
    """The kinds for times on threads, in the order of ``NAMES``."""
    return joint_kinds(PLAN, NAMES, dict(zip(NAMES, host_s, strict=True)), step_s)


def test_a_thread_group_is_busy_with_all_its_tasks() -> None:
    """The busiest come first among those that set the pace."""
    busy = busy_s(PLAN, dict(zip(NAMES, (1.0, 2.0, 9.5, 8.0, 2.0), strict=True)))
    assert busy == {"io": 3.0, "copies": 9.5, "default": 10.0}
    assert limiting(busy, 10.0) == ("default", "copies")


def test_the_tasks_of_the_busiest_group() -> None:
    """They tell how much shorter an iteration gets until another group is the busiest."""
    assert kinds(1.0, 2.0, 4.0, 8.0, 2.0) == {
        ("train", "step"): "the busiest thread group, default"
    }


def test_all_groups_that_are_equally_busy() -> None:
    """None of their tasks saves anything alone."""
    found = kinds(5.0, 5.0, 9.5, 4.0, 1.0)
    assert found == {
        ("read", "decode"): "the busiest thread group, io",
        ("read", "decode", "copy"): "all groups that are busy all the time, io, copies",
    }


def test_a_single_task_is_measured_anyway() -> None:
    """A group of one task is no joint shortcut."""
    assert kinds(1.0, 1.0, 10.0, 1.0, 1.0) == {}


@pytest.mark.parametrize("names", [("read", "copy"), ()])
def test_only_tasks_that_are_measured_are_shortcut(names: tuple[str, ...]) -> None:
    """The user has said which."""
    host_s = dict.fromkeys(NAMES, 5.0)
    assert joint_kinds(PLAN, names, host_s, 10.0) == {}


def test_one_thread_has_no_pace_to_share() -> None:
    """All of its tasks together take all of the iteration."""
    plan = overlapped({"default": ["read", "train"]})
    assert joint_kinds(plan, ("read", "train"), {"read": 1.0, "train": 1.0}, 2.0) == {}
