"""Accesses to parameters, buffers, gradients and optimizer state, and their names."""

from __future__ import annotations

import copy
import random
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from swpipe import DeclaredIO, PipelinePlan, PipelineTask, TaskSchedule
from swpipe.errors import PlanError
from swpipe.inference import record
from tests.inference.helpers import WORD, orders, reads, recorded, writes


class Job:
    """A small training step.

    Args:
        make: Makes the optimizer of some parameters.
    """

    def __init__(self, make: Any = None) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.optimizer = make(self.model.parameters())

    def forward(self, ctx: Any) -> None:
        ctx.loss = self.model(ctx.batch).square().mean()

    def zero_grad(self, ctx: Any) -> None:
        self.optimizer.zero_grad()

    def backward(self, ctx: Any) -> None:
        ctx.loss.backward()

    def step(self, ctx: Any) -> None:
        self.optimizer.step()


BATCH = torch.linspace(-1, 1, 6).reshape(2, 3)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused adam": lambda p: torch.optim.Adam(p, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_step_needs_no_declaration(name: str) -> None:
    """Parameters, gradients and optimizer state are recorded, and restored bit for bit."""
    job = Job(OPTIMIZERS[name])
    before = copy.deepcopy(job.model.state_dict())
    found = recorded(job.zero_grad, job.forward, job.backward, job.step, batch=BATCH)
    assert all(torch.equal(v, before[k]) for k, v in job.model.state_dict().items())
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert not job.optimizer.state
    assert reads(found, "forward") == {"ctx.batch", "model parameters"}
    assert writes(found, "forward") == {"ctx.loss"}
    assert writes(found, "zero_grad") == {"model gradients"}
    assert writes(found, "backward") == {"model gradients"}
    assert {"model parameters", "model gradients"} <= reads(found, "step")
    assert "model parameters" in writes(found, "step")
    assert ("optimizer state" in writes(found, "step")) == (name != "sgd")
    assert orders(found) == {
        ("backward", "zero_grad", 0),
        ("backward", "forward", 0),
        ("step", "backward", 0),
        ("forward", "step", 1),
        ("zero_grad", "step", 1),
    }


def test_gradients_accumulate_and_options_are_state() -> None:
    """A backward follows the previous one; a scheduler comes between two steps."""
    job = Job()
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1)

    def schedule(ctx: Any) -> None:
        scheduler.step()

    found = recorded(job.forward, job.backward, job.step, schedule, batch=BATCH)
    assert "model gradients" in reads(found, "backward") & writes(found, "backward")
    assert writes(found, "schedule") == {"optimizer options"}
    assert {("schedule", "step", 0), ("step", "schedule", 1)} <= orders(found)


def test_buffers_are_state() -> None:
    """A batch norm writes its running statistics in training and reads them in evaluation."""
    norm = nn.BatchNorm1d(3)

    def train(ctx: Any) -> None:
        norm.train()
        ctx.y = norm(ctx.batch)

    def evaluate(ctx: Any) -> None:
        norm.eval()
        ctx.z = norm(ctx.batch)

    found = recorded(train, evaluate, batch=BATCH)
    assert any("buffers" in state for state in writes(found, "train"))
    assert not any("buffers" in state for state in writes(found, "evaluate"))
    assert ("train", "evaluate", 1) in orders(found)
    assert not [note for note in found.notes if "no operator says" in note]


def test_a_detached_copy_is_not_state() -> None:
    """A copy of a parameter belongs to the context; a view of it is still the parameter."""
    weight = nn.Parameter(torch.ones(3))

    def take(ctx: Any) -> None:
        ctx.copy = weight.detach().clone()
        ctx.view = weight.detach()

    def use_copy(ctx: Any) -> None:
        ctx.y = ctx.copy * 2

    def use_view(ctx: Any) -> None:
        ctx.z = ctx.view * 2

    def step(ctx: Any) -> None:
        with torch.no_grad():
            weight.add_(1)

    found = recorded(take, use_copy, use_view, step, state={"weight": weight})
    assert reads(found, "use_copy") == {"ctx.copy"}
    assert reads(found, "use_view") == {"ctx.view", "weight"}
    assert orders(found) >= {("step", "use_view", 0), ("take", "step", 1)}


def test_separately_used_parts_of_a_model_are_separate_states() -> None:
    """Two halves with their own optimizers need no order between them."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

    def half(name: str) -> Any:
        def train(ctx: Any) -> None:
            model[name].zero_grad()
            model[name](ctx.batch).sum().backward()
            with torch.no_grad():
                for parameter in model[name].parameters():
                    parameter.sub_(parameter.grad)

        train.__name__ = name
        return train

    found = recorded(half("a"), half("b"), batch=BATCH, state={"model": model})
    assert writes(found, "a").isdisjoint(writes(found, "b"))
    assert orders(found) == set()


def test_a_tensor_that_each_iteration_makes_anew_is_one_state() -> None:
    """An item of a list is an example; the trial cannot restore it, and says so."""
    mean = [torch.zeros(1)]

    def add(ctx: Any) -> None:
        mean[0] = mean[0] + ctx.batch.sum() + 1

    def show(ctx: Any) -> None:
        ctx.shown = mean[0] * 1

    with pytest.warns(RuntimeWarning, match=r"makes in one iteration for the next: float32 \[1\]"):
        found = recorded(add, show, batch=BATCH)
    (state,) = writes(found, "add")
    assert reads(found, "show") == {state} == {"unnamed memory (float32 [1], first seen in 'add')"}
    assert orders(found) == {("show", "add", 0), ("add", "show", 1)}


def test_memory_gets_a_description() -> None:
    """A cache, or a staging buffer in the context, orders the tasks that use it."""
    staging = torch.zeros(2, 3)

    def copy_in(ctx: Any) -> None:
        ctx.inputs = staging.copy_(ctx.batch)

    def use(ctx: Any) -> None:
        ctx.y = ctx.inputs * 2

    found = recorded(copy_in, use, batch=BATCH)
    assert reads(found, "use") == {"ctx.inputs", "memory (float32 [2, 3])"}
    assert writes(found, "copy_in") == {"ctx.inputs", "memory (float32 [2, 3])"}
    assert orders(found) == {("use", "copy_in", 0), ("copy_in", "use", 1)}


def test_draws_keep_their_order() -> None:
    """Each generator is a state, except for random tasks; the notes say how to avoid the order."""
    own = torch.Generator()

    def one(ctx: Any) -> None:
        ctx.one = torch.rand(2, generator=own)

    def two(ctx: Any) -> None:
        ctx.two = torch.rand(2, generator=own)

    def draw_torch(ctx: Any) -> None:
        ctx.x = torch.rand(2)

    def draw_python(ctx: Any) -> None:
        ctx.y = random.random()

    found = recorded(one, draw_torch, two, draw_python)
    assert orders(found) == {("two", "one", 0), ("one", "two", 1)}
    assert writes(found, "one") == {"ctx.one", "Generator"}
    assert writes(found, "draw_torch") == {"ctx.x", "torch's default generators"}
    assert writes(found, "draw_python") == {"ctx.y", "Python's default generator"}
    (note,) = [note for note in found.notes if "random=True" in note]
    assert note.startswith("'draw_torch'")
    tasks = [PipelineTask(name, draw_torch, random=True, pure=True) for name in ("a", "b")]
    assert writes(record(tasks, None, device="cpu"), "a") == {"ctx.x"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_sets_the_generators_in_the_backward(reentrant: bool) -> None:
    """It restores them: a task that draws in the meantime would draw other numbers."""
    model = nn.Linear(4, 1)

    def load(ctx: Any) -> None:
        ctx.x = torch.rand(3, 4, requires_grad=True)

    def forward(ctx: Any) -> None:
        ctx.loss = checkpoint(model, ctx.x, use_reentrant=reentrant).sum()

    def backward(ctx: Any) -> None:
        ctx.loss.backward()

    found = recorded(load, forward, backward)
    assert "torch's default generators" in writes(found, "backward")
    assert "torch's default generators" not in writes(found, "forward")


# ---------------------------------------------------------------------------------- declared


def test_declared_memory_belongs_to_the_declared_state() -> None:
    """Any way to reach it counts, and unseen accesses, too; other memory is not affected."""
    job = Job()
    table = job.model[2].weight
    rows = table.detach()[0]

    def peek(ctx: Any) -> None:
        ctx.row = rows + 1

    log = DeclaredIO(state="log")
    io = {"forward": [DeclaredIO(state="table", mode="r", memory={"first": [table]})]}
    functions = (job.forward, job.backward, job.step, peek)
    tasks = [PipelineTask(f.__name__, f, io.get(f.__name__, [WORD])) for f in functions]
    tasks += [PipelineTask(name, lambda ctx: None, [log]) for name in ("a", "b")]
    state = {"model": job.model, "optimizer": job.optimizer}
    found = record(tasks, BATCH, device="cpu", state=state)
    assert found.states["table"] == ("model.2.weight",)
    assert reads(found, "forward") == {"ctx.batch", "table", "model parameters"}
    assert "table" in writes(found, "step")
    assert reads(found, "peek") == {"table"}
    assert orders(found) > {("b", "a", 0), ("a", "b", 1)}


def test_modules_and_shards_can_be_declared() -> None:
    """They are restored like others; of a sharded tensor, this rank's part."""

    class Sharded:
        def local_shards(self) -> list[Any]:
            return [SimpleNamespace(tensor=part) for part in table]

    layer, table = nn.Linear(3, 1), torch.ones(2, 3)
    hidden: Any = weakref.ref(layer)  # not looked into

    def step(ctx: Any) -> None:
        ctx.row = table[0] + 1
        with torch.no_grad():
            hidden().weight.add_(1)

    before = layer.weight.detach().clone()
    io = [
        DeclaredIO(state="tables", memory=layer),
        DeclaredIO(state="rows", mode="r", memory={"table": Sharded()}),
    ]
    found = record([PipelineTask("step", step, io)], None, device="cpu")
    assert found.states == {"tables": ("tables.weight",), "rows": ("rows", "rows (2)")}
    assert torch.equal(layer.weight, before)


def test_memory_that_cannot_be_declared() -> None:
    """It is memory of two states, or no tensor."""
    weight = nn.Parameter(torch.ones(2, 3))
    io = [DeclaredIO(state=name, memory=[weight.detach()[part]]) for part, name in enumerate("ab")]
    with pytest.raises(PlanError, match=r"'step' declares that state 'b' .*shape \[3\].* 'a'"):
        record([PipelineTask("step", lambda ctx: None, io)], None, device="cpu")
    io = [DeclaredIO(state="tables", memory=[nn.Linear(1, 1), "tables.weight"])]
    with pytest.raises(PlanError, match="state 'tables' lies in 'tables.weight': give tensors"):
        record([PipelineTask("step", lambda ctx: None, io)], None, device="cpu")


def test_a_stale_state_makes_no_other_stale() -> None:
    """Only the table may be read one step behind; the buffers next to it are separate states."""
    table = nn.Embedding(4, 2)
    table.register_buffer("looked_up", torch.zeros(1))
    table.register_buffer("scale", torch.ones(1))

    def look_up(ctx: Any) -> None:
        table.looked_up.add_(1)
        ctx.loss = (table(ctx.batch) * table.scale).sum()

    def update(ctx: Any) -> None:
        (gradient,) = torch.autograd.grad(ctx.loss, [table.weight])
        with torch.no_grad():
            table.weight.sub_(gradient * table.scale)

    io = DeclaredIO(state="table", mode="r", memory=table.weight)
    tasks = PipelineTask("look up", look_up, [io]), PipelineTask("update", update)
    found = record(tasks, torch.tensor([0, 3]), device="cpu", state={"table": table})
    assert {"table", "table.looked_up", "table.scale"} == set(found.states)
    later = PipelinePlan(
        schedule={"look up": TaskSchedule(stage=0), "update": TaskSchedule(stage=1)},
        deps=[("update", "look up")],
        order=["look up", "update"],
        pipeline_depth=2,
        stale={"table": 1},
    )
    assert found.compare(later).missing == ()
    assert found.compare(replace(later, stale={})).missing[0][:3] == ("look up", "update", 1)


# ----------------------------------------------------------------------- what is hard to see


def test_a_saved_tensor_is_not_read_through_another_reference() -> None:
    """A kernel's module keeps its last arguments; backward has its own reference to them."""

    class Kept(nn.Module):
        last: torch.Tensor | None = None

        def look(self, ctx: Any) -> None:
            x = (ctx.batch * 2).requires_grad_()
            self.last = x.detach()
            ctx.loss = x.square().sum()

        def backward(self, ctx: Any) -> None:
            ctx.loss.backward()

        def backward_and_show(self, ctx: Any) -> None:
            self.backward(ctx)
            ctx.shown = self.last + 1

    kept = Kept()
    state = {"Kept": kept}
    found = recorded(kept.look, kept.backward, batch=BATCH, state=state)
    assert orders(found) == {("backward", "look", 0)}
    found = recorded(kept.look, kept.backward_and_show, batch=BATCH, state=state)
    assert "Kept.last" in reads(found, "backward_and_show")
    assert ("look", "backward_and_show", 1) in orders(found)


def test_memory_that_the_next_iteration_writes_in_place_is_read_as_state() -> None:
    """A task that reads the memory through the context comes before the write."""

    class Kept(nn.Module):
        last: torch.Tensor | None = None

        def clear(self, ctx: Any) -> None:
            if self.last is not None:
                self.last.zero_()

        def keep(self, ctx: Any) -> None:
            ctx.y = ctx.batch + 1
            self.last = ctx.y

        def show(self, ctx: Any) -> None:
            ctx.shown = ctx.y * 2

    kept = Kept()
    found = recorded(kept.clear, kept.keep, kept.show, batch=BATCH, state={"Kept": kept})
    assert reads(found, "show") == {"ctx.y", "Kept.last"}
    assert ("clear", "show", 1) in orders(found)


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_reused_buffer_is_read_by_backward(iterations: int) -> None:
    """The next iteration writes where backward reads; one iteration does not show that."""
    room: list[torch.Tensor] = []

    def look(ctx: Any) -> None:
        if not room:
            room.append(torch.empty(2, 3))
        room[0].copy_(ctx.batch)
        ctx.loss = (torch.ones(2, 3, requires_grad=True) * room[0]).sum()

    def backward(ctx: Any) -> None:
        ctx.loss.backward()

    found = recorded(look, backward, batch=BATCH, iterations=iterations)
    assert ("look", "backward", 1) in orders(found)


def test_reads_in_a_hook_of_backward_are_recorded() -> None:
    """Hooks and custom functions run in Python and can read anything."""
    kept: list[Any] = [None]

    def hooked(ctx: Any) -> None:
        kept[0] = ctx.batch + 1
        x = ctx.batch.detach().requires_grad_()
        x.register_hook(lambda gradient: gradient * kept[0])
        ctx.loss = (x * 2).sum()

    def backward(ctx: Any) -> None:
        ctx.loss.backward()

    assert ("hooked", "backward", 1) in orders(recorded(hooked, backward, batch=BATCH))


def test_a_write_that_a_schema_does_not_declare_is_detected() -> None:
    """A custom kernel modifies an argument that its schema calls read-only."""

    @torch.library.custom_op("swpipe_tests::sneaky", mutates_args=())
    def sneaky(x: torch.Tensor) -> torch.Tensor:
        x.detach().numpy()[:] = 5
        return x.clone()

    table = torch.zeros(3)

    def update(ctx: Any) -> None:
        ctx.y = sneaky(table)

    def look(ctx: Any) -> None:
        ctx.z = table + 1

    found = recorded(update, look, state={"table": table})
    assert "table" in writes(found, "update")
    assert ("look", "update", 0) in orders(found)
    (note,) = [one for one in found.notes if "no operator says" in one]
    assert "'update' modified table" in note


def test_freezing_a_parameter_is_a_write() -> None:
    """Therefore it is ordered with backward."""
    job = Job()

    def freeze(ctx: Any) -> None:
        job.model[0].weight.requires_grad_(ctx.iter_idx % 2 == 0)

    found = recorded(freeze, job.forward, batch=BATCH, iterations=3)
    assert any("weight" in state or "parameters" in state for state in writes(found, "freeze"))


def test_keeping_an_output_does_not_make_readers_of_the_state() -> None:
    """A task that reads the loss from the context does not read the kept one."""
    kept: list[torch.Tensor] = []

    def keep(ctx: Any) -> None:
        ctx.loss = ctx.batch.sum()
        kept[:] = [ctx.loss]

    def show(ctx: Any) -> None:
        ctx.shown = ctx.loss + 1

    found = recorded(keep, show, batch=BATCH)
    assert reads(found, "show") == {"ctx.loss"}
    assert orders(found) == {("show", "keep", 0)}


def test_memory_that_only_the_task_that_makes_it_uses_is_no_state() -> None:
    """A task that keeps a tensor of each iteration needs no order."""
    history: list[torch.Tensor] = []

    def keep(ctx: Any) -> None:
        history.append(ctx.batch.sum())

    found = recorded(keep, batch=BATCH)
    assert len(history) == 4  # two iterations show the state, and two are recorded
    assert writes(found, "keep") == set()
    assert orders(found) == set()


def test_parameters_can_share_a_storage_and_equal_names_are_numbered() -> None:
    """Views of one flat buffer: writing one writes the others' memory. Two models are two."""
    flat = torch.zeros(4)
    left, right = nn.Parameter(flat[:2]), nn.Parameter(flat[2:])
    layers = nn.Linear(3, 1), nn.Linear(3, 1)

    def read_left(ctx: Any) -> None:
        ctx.y = left * 2, layers[0](ctx.batch)

    def write_right(ctx: Any) -> None:
        ctx.z = layers[1](ctx.batch)
        with torch.no_grad():
            right.add_(1)

    found = recorded(read_left, write_right, batch=BATCH)
    assert ("write_right", "read_left", 0) in orders(found)
    assert "Linear parameters" in reads(found, "read_left") - reads(found, "write_right")
    assert "Linear (2) parameters" in reads(found, "write_right")
