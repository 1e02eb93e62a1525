"""``record`` itself: arguments, failures, restored state, and its plan."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from swpipe import PipelineTask, PlanError, UnsavedStateError
from swpipe.core.effects import Location
from swpipe.inference import record
from tests.inference.helpers import orders, reads, recorded, writes


def nothing(ctx: Any) -> None:
    """Does nothing."""


def test_tasks_are_required_and_have_unique_names() -> None:
    """Both raise PlanError."""
    with pytest.raises(PlanError, match="no tasks to record"):
        record([], None)
    with pytest.raises(PlanError, match="'a' is given 2 times"):
        record([PipelineTask("a", nothing), PipelineTask("a", nothing)], None)


@pytest.mark.parametrize("iterations", [0, 1.5, True, "2"])
def test_iterations_must_be_a_positive_integer(iterations: Any) -> None:
    """Booleans and strings are refused too."""
    with pytest.raises(ValueError, match="integer of 1 or more"):
        record([PipelineTask("a", nothing)], None, iterations=iterations)


def test_an_object_without_state_is_refused() -> None:
    """As in the profiler."""
    with pytest.raises(TypeError, match="cannot be restored"):
        record([PipelineTask("a", nothing)], None, state=[object()])


class Failing:
    """Trains, then fails in the second iteration.

    Args:
        error: What to raise.
    """

    def __init__(self, error: BaseException) -> None:
        self.model = nn.Linear(2, 1)
        self.error = error
        self.count = 0

    def train(self, ctx: Any) -> None:
        """Changes the model, and a plain number."""
        self.count += 1
        with torch.no_grad():
            self.model.weight.add_(1)

    def fail(self, ctx: Any) -> None:
        """In the second iteration."""
        if ctx.iter_idx == 1:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_a_task_failure_is_raised_as_itself(error: BaseException) -> None:
    """It gets a note of where; the model is restored, and recording has ended."""
    job = Failing(error)
    before = copy.deepcopy(job.model.state_dict())
    with pytest.raises(type(error)) as caught:
        recorded(job.train, job.fail)
    assert caught.value is error
    assert "raised by task 'fail', iteration 1, while its effects were being recorded" in str(
        error.__notes__
    )
    assert all(torch.equal(v, before[k]) for k, v in job.model.state_dict().items())
    assert _get_current_dispatch_mode() is None


def test_the_notes_name_what_was_not_restored() -> None:
    """Such as an object of a library that grows."""
    seen = logging.Filterer()

    def note(ctx: Any) -> None:
        seen.addFilter(lambda record: True)

    (remark,) = [one for one in recorded(note).notes if "Not restored" in one]
    assert "the length of seen.filters" in remark


def test_an_optimizer_that_is_not_restored_does_not_step() -> None:
    """It is too many attributes away to be found: the recording raises before its first step."""
    model = nn.Linear(2, 1)
    held: Any = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(4):
        held = SimpleNamespace(inner=held)

    def train(ctx: Any) -> None:
        model(ctx.batch).sum().backward()
        held.inner.inner.inner.inner.optimizer.step()

    before = model.weight.detach().clone()
    with pytest.raises(UnsavedStateError, match=r"step of an optimizer.*SGD.*state=\["):
        record([PipelineTask("train", train)], torch.ones(1, 2))
    assert torch.equal(model.weight, before)


def test_one_iteration_records_what_it_runs() -> None:
    """What only the second one does, such as setting gradients to None, is assumed."""
    weight = nn.Parameter(torch.ones(2))

    def zero(ctx: Any) -> None:
        weight.grad = None

    def backward(ctx: Any) -> None:
        (weight * 2).sum().backward()

    effects = recorded(zero, backward, iterations=1).effects["zero"]
    assert effects.writes <= effects.assumed
    assert Location("weight.grad", True) in effects.assumed
    assert writes(recorded(zero, backward), "zero") == {"weight.grad"}


def test_compiled_functions_run_eagerly() -> None:
    """Recording disables ``torch.compile``."""
    model = nn.Linear(2, 2)

    def refuse(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise AssertionError("compiled")

    compiled = torch.compile(model, backend=refuse)

    def forward(ctx: Any) -> None:
        ctx.y = compiled(ctx.batch)

    found = recorded(forward, batch=torch.ones(1, 2))
    assert any("parameters" in state for state in reads(found, "forward"))


def test_under_inference_mode_and_autocast() -> None:
    """Reads are recorded under both."""
    model = nn.Linear(2, 2)

    def evaluate(ctx: Any) -> None:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            ctx.y = model(ctx.batch)

    def double(ctx: Any) -> None:
        with torch.inference_mode():
            ctx.y.mul_(2)

    found = recorded(evaluate, double, batch=torch.ones(1, 2))
    assert "model parameters" in reads(found, "evaluate")
    assert writes(found, "double") == {"ctx.y"}


def test_sparse_gradients_are_recorded() -> None:
    """Those of an embedding, as indices and values."""
    table = nn.EmbeddingBag(5, 2, sparse=True, mode="sum")
    optimizer = torch.optim.SparseAdam(table.parameters())

    def backward(ctx: Any) -> None:
        optimizer.zero_grad()
        table(ctx.batch).sum().backward()

    def step(ctx: Any) -> None:
        optimizer.step()

    found = recorded(backward, step, batch=torch.tensor([[0, 1], [1, 4]]))
    assert "table.weight" in reads(found, "backward")
    assert "table.weight.grad" in reads(found, "step")
    assert orders(found) == {("step", "backward", 0), ("backward", "step", 1)}


def test_a_module_as_task_and_lists_of_modules() -> None:
    """Modules and tensors in plain lists and dicts of a module are found."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Linear(2, 2)]

        def forward(self, ctx: Any) -> None:
            ctx.y = self.hidden[0](torch.ones(1, 2))

    found = record([PipelineTask("run", Holder())], None, device="cpu")
    assert set(found.states["Holder parameters"]) == {
        "Holder.hidden[0].weight",
        "Holder.hidden[0].bias",
    }


def test_infer_makes_a_plan_that_keeps_the_tasks() -> None:
    """Stage 0, the caller's thread, the given order, and the inferred dependences."""

    def make(ctx: Any) -> None:
        ctx.a = 1

    def use(ctx: Any) -> None:
        ctx.b = ctx.a

    tasks = [PipelineTask("make", make), PipelineTask("use", use)]
    plan = record(tasks, None, device="cpu").plan()
    assert plan.tasks == tuple(tasks)
    assert plan.deps == (("use", "make"),)
    assert plan.cross_iter_deps == ()
    assert plan.depth == 1


def test_a_task_that_communicates_is_globally_ordered(tmp_path: Any) -> None:
    """The schedule and the notes say so."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:

        def reduce(ctx: Any) -> None:
            torch.distributed.all_reduce(ctx.batch)

        tasks = [PipelineTask("reduce", reduce), PipelineTask("rest", nothing)]
        plan = record(tasks, torch.ones(2), device="cpu").plan()
        found = record(tasks, torch.ones(2), device="cpu")
    finally:
        torch.distributed.destroy_process_group()
    assert [entry.globally_ordered for entry in plan.schedule.values()] == [True, False]
    assert writes(found, "reduce") == {"ctx.batch"}
    assert any("'reduce' communicates" in note for note in found.notes)


def test_a_given_state_does_not_switch_the_guard_off() -> None:
    """What ``state`` leaves out is not trained: the error comes before the step."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(ctx: Any) -> None:
        model(ctx.batch).sum().backward()
        optimizer.step()

    with pytest.raises(UnsavedStateError, match="step of an optimizer"):
        record([PipelineTask("train", train)], torch.ones(1, 2), state=nn.Linear(1, 1))
