"""What commands measure of a workload, and what they say of a plan that was tuned for it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from swpipe import PipelineTask
from swpipe.cli.app import format_outcome
from swpipe.cli.user_inputs import Opened
from swpipe.plans.prefetch import prefetch_plan
from swpipe.tasks.images import images_workload
from swpipe.tuning import Candidate

CONTEXT: Any = SimpleNamespace(obj=None)
"""The context of a command that runs in one process."""


def test_all_batches_of_a_short_pass_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of three batches would not show what comes every tenth time."""
    module: Any = ModuleType("my_loop")
    module.loop = lambda: ([PipelineTask("train", lambda ctx: None)], iter(range(20)))
    monkeypatch.setitem(sys.modules, "my_loop", module)
    with Opened(CONTEXT, "my_loop:loop", None) as opened:
        assert [*opened.measured()] == [*range(20)]


def test_the_image_model_is_measured_on_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch has more batches than are measured."""
    monkeypatch.setattr(images_workload, "_DIFFERENT", 2)
    with Opened(CONTEXT, "images", None) as opened:
        assert len([*opened.measured()]) > 1


def test_the_outcome_of_a_plan_is_compared_with_prediction_and_trial() -> None:
    """By how much training took more or less time than either."""
    plan = prefetch_plan(["load"], ["add"])
    tuned: Any = SimpleNamespace(chosen=Candidate("planned", plan, 8e3, rounds_us=(10e3,)))
    trained: Any = SimpleNamespace(steps_per_s=80.0)
    assert format_outcome(tuned, trained) == (
        "auto: expected 8.000 ms per step (+56.2%), tried 10.000 ms per step (+25.0%), got 12.500"
    )
