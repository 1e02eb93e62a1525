"""The measurements of workloads by commands, and the text on a tuned plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from swpipe import PipelineTask
from swpipe.cli import user_inputs
from swpipe.cli.app import format_outcome
from swpipe.cli.user_errors import UserError
from swpipe.cli.user_inputs import Job, Opened, checked_device
from swpipe.plans.prefetch import prefetch_plan
from swpipe.tasks import images
from swpipe.tuning import Candidate

CONTEXT: Any = SimpleNamespace(obj=None)
"""The context of a command that runs in one process."""


class Unknown:
    """A loader of an unknown class."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])


def test_all_batches_of_a_short_pass_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of three batches would not show what comes every tenth time."""
    module: Any = ModuleType("my_loop")
    module.loop = lambda: ([PipelineTask("train", lambda ctx: None)], iter(range(20)))
    monkeypatch.setitem(sys.modules, "my_loop", module)
    assert [*Job("my_loop:loop", None).sample()] == [*range(20)]


def test_the_image_model_is_measured_on_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch has more batches than are measured."""
    monkeypatch.setattr(images, "_DIFFERENT", 2)
    assert len([*Job("images", None).sample()]) > 1


def test_the_leading_pure_tasks_run_ahead_under_the_plan_pipelined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loader does, too, if it is apart; with only such tasks, or none, there is no plan."""
    pure = [PipelineTask(name, lambda ctx: None, pure=True) for name in ("read", "decode")]
    train = [PipelineTask(name, lambda ctx: None) for name in ("forward", "step")]
    module: Any = ModuleType("my_loop")
    monkeypatch.setitem(sys.modules, "my_loop", module)
    for batches, group in (([1], "loader"), (iter([1]), "loader"), (Unknown(), None)):
        module.loop = lambda batches=batches: ([*pure, *train], batches)
        plan = Opened(CONTEXT, "my_loop:loop", None, ["pipelined"]).plan()
        stages = {str(name): entry.stage for name, entry in plan.schedule.items()}
        assert stages == {"read": 0, "decode": 0, "forward": 1, "step": 1}
        assert plan.cross_iter_deps == (("forward", "step", 1),)
        assert plan.pull_group == group
    for tasks, count in ((train, "0 of 2"), (pure, "2 of 2")):
        module.loop = lambda tasks=tasks: (tasks, [1])
        with pytest.raises(UserError, match=f"plan pipelined: .*, and {count} tasks of my_loop:"):
            Opened(CONTEXT, "my_loop:loop", None, ["pipelined"]).plan()


def test_the_image_model_says_that_it_trains_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device is refused; a loop of the user may have it."""
    monkeypatch.setattr(user_inputs, "resolve", lambda device: None)
    assert checked_device("images", None) == "cpu"
    assert checked_device("my_loop:loop", None) is None
    assert checked_device("my_loop:loop", "meta") == "meta"
    with pytest.raises(UserError, match="--device meta: the image model trains on the CPU"):
        checked_device("images", "meta")


def test_the_outcome_of_a_plan_is_compared_with_prediction_and_trial() -> None:
    """The output says by how much the training took more or less time than either."""
    plan = prefetch_plan(["load"], ["add"])
    tuned: Any = SimpleNamespace(chosen=Candidate("planned", plan, 8e3, rounds_us=(10e3,)))
    trained: Any = SimpleNamespace(steps_per_s=80.0)
    assert format_outcome(tuned, trained) == (
        "auto: expected 8.000 ms per step (+56.2%), tried 10.000 ms per step (+25.0%), got 12.500"
    )
