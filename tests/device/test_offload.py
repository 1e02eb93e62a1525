"""Cases that an offload refuses; it does nothing on a device without streams."""

from __future__ import annotations

import pytest
import torch

from swpipe import PipelinePlan, PipelineTask
from swpipe.device.offload import Offload, offloaded, with_offload
from swpipe.errors import PlanError
from tests.support.offload_layers import Layers

TASKS = [PipelineTask(name, lambda ctx: None) for name in "abcd"]


def test_nothing_is_moved_on_a_cpu() -> None:
    """The same tasks and plan run there, and have the same numbers."""
    layers = Layers(3, torch.device("cpu"), lambda ms: None)
    assert all(map(torch.equal, layers.gradients([0, 1], 2), layers.gradients([], 2)))


def test_a_pair_names_tasks_that_are_there() -> None:
    """The message has the name and the existing tasks."""
    for pair in (Offload("x", "a", "e", "cpu"), Offload("x", "f", "d", "cpu")):
        for refused in (
            lambda pair=pair: offloaded(TASKS, [pair]),
            lambda pair=pair: with_offload(PipelinePlan.serial(TASKS), [pair]),
        ):
            with pytest.raises(
                PlanError, match="offload 'x' names '[ef]', which is none of .* a, b"
            ):
                refused()


def test_what_outlives_iterations_is_said_in_full() -> None:
    """Its place and its state are both needed."""
    with pytest.raises(ValueError, match="give all three"):
        Offload("x", "a", "d", "cpu", state="moments", freed="b")


def test_a_restore_overlaps_the_task_before_its_user_and_no_more() -> None:
    """It comes after the task before that one, in the plan's dependences and in its order."""
    plan = with_offload(PipelinePlan.serial(TASKS), [Offload("x", "a", "d", "cpu")])
    assert plan.order == ("a", "stash x", "b", "restore x", "c", "d")
    assert {("restore x", "b"), ("restore x", "stash x"), ("d", "restore x")} <= {*plan.deps}
