"""What code may do in other iterations counts, although no recorded iteration did it."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swpipe import PipelineTask, PlanError, TaskSchedule
from swpipe.analysis import verify
from swpipe.inference import record
from tests.inference.helpers import orders, reads, recorded, writes

BATCH = torch.ones(3, 4)


def test_a_tensor_that_is_read_may_be_modified_by_code_that_modifies_some() -> None:
    """A parameter only where the code lets it: with gradients on, torch refuses."""
    model, table = nn.Linear(4, 1), torch.zeros(3)

    def forward(ctx: Any) -> None:
        ctx.y = model(ctx.batch) + table.sum()
        ctx.y += 1

    def guard(ctx: Any) -> None:
        if model.weight.norm() > 100:
            with torch.no_grad():
                model.weight.mul_(0.5)

    def note(ctx: Any) -> None:
        if table.sum() > 100:
            table[0] = 1

    found = recorded(forward, guard, note, batch=BATCH)
    assert "model parameters" in writes(found, "guard")
    assert writes(found, "note") == {"table"}
    assert writes(found, "forward") == {"ctx.y"}
    assert ("forward", "guard", 1) in orders(found)


def test_a_tensor_may_be_modified_through_an_attribute_by_an_operator() -> None:
    """Or by a function that is given it as ``out``."""
    scale = torch.ones(1)

    class Schedule:
        def __init__(self) -> None:
            self.scale = scale

        def load(self, ctx: Any) -> None:
            ctx.x = ctx.batch * scale

        def halve(self, ctx: Any) -> None:
            if self.scale.sum() > 1e9:
                self.scale *= 0.5

        def double(self, ctx: Any) -> None:
            if self.scale.sum() > 1e9:
                torch.mul(self.scale, 2, out=self.scale)

    schedule = Schedule()
    found = recorded(schedule.load, schedule.halve, schedule.double, batch=BATCH)
    assert writes(found, "load") == {"ctx.x"}
    assert "scale" in writes(found, "halve")
    assert "scale" in writes(found, "double")


def test_code_that_may_clear_gradients_writes_them() -> None:
    """Whether or not it did so."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def backward(ctx: Any) -> None:
        ctx.loss = model(ctx.batch).sum()
        ctx.loss.backward()

    def skip(ctx: Any) -> None:
        if ctx.loss > 1e9:
            optimizer.zero_grad()

    found = recorded(backward, skip, lambda_step(optimizer), batch=BATCH)
    assert writes(found, "skip") == {"model gradients"}
    assert ("step", "skip", 0) in orders(found)


def lambda_step(optimizer: torch.optim.Optimizer) -> Any:
    """A task's function that calls an optimizer's step."""

    def step(ctx: Any) -> None:
        optimizer.step()

    return step


def test_code_that_names_a_draw_may_draw() -> None:
    """It keeps its order with whoever draws from the same generator; a seeded task does not."""

    def load(ctx: Any) -> None:
        ctx.x = ctx.batch * random.random() + torch.rand(())

    def sample(ctx: Any) -> None:
        if ctx.batch.sum() > 1e9:
            ctx.y = random.random() + torch.rand(())

    def other(ctx: Any) -> None:
        ctx.z = ctx.batch.sum()

    found = recorded(load, sample, other, batch=BATCH)
    drawn = {"Python's default generator", "torch's default generators"}
    assert drawn <= writes(found, "sample")
    assert not drawn & writes(found, "other")
    assert ("load", "sample", 1) in orders(found)
    alone = record([PipelineTask("sample", sample, random=True)], BATCH, device="cpu")
    assert "torch's default generators" not in writes(alone, "sample")


def test_code_that_sets_the_default_dtype_keeps_its_order_with_every_task() -> None:
    """Others would make tensors of another type meanwhile."""

    def load(ctx: Any) -> None:
        ctx.x = torch.zeros(2)

    def exact(ctx: Any) -> None:
        if len(ctx.batch) > 100:
            torch.set_default_dtype(torch.float64)
            ctx.sum = torch.zeros(1)
            torch.set_default_dtype(torch.float32)

    found = recorded(load, exact, batch=BATCH)
    assert orders(found) == {("exact", "load", 0), ("load", "exact", 1)}


@pytest.mark.parametrize("part", [slice(None), slice(1, None), slice(None, None, -1)])
def test_an_array_that_shares_memory_with_a_tensor_is_that_tensor(part: slice) -> None:
    """A view of it as well, whichever of the two code modifies."""
    array = np.ones(4, dtype=np.float32)
    tensor, view = torch.from_numpy(array[:3]), array[part]

    def forward(ctx: Any) -> None:
        ctx.y = tensor.sum()

    def weigh(ctx: Any) -> None:
        if ctx.y > 100:
            view[0] = 0.5

    def look(ctx: Any) -> None:
        ctx.z = ctx.y + array[0]

    found = recorded(forward, weigh, look, batch=BATCH)
    assert ("forward", "weigh", 1) in orders(found)
    assert "tensor" in writes(found, "weigh") - writes(found, "look")
    assert "tensor" in reads(found, "look")


@pytest.mark.parametrize("value", [threading.local(), ContextVar("scale", default=1.0)])
def test_what_each_thread_has_for_itself_keeps_its_users_on_the_callers_thread(value: Any) -> None:
    """A task elsewhere would not find what another one keeps there."""
    local = isinstance(value, threading.local)

    def note(ctx: Any) -> None:
        if local:
            value.scale = float(ctx.batch[0, 0])
        else:
            value.set(float(ctx.batch[0, 0]))

    def use(ctx: Any) -> None:
        ctx.x = value.scale if local else value.get()

    def other(ctx: Any) -> None:
        ctx.z = ctx.batch * 2

    found = recorded(note, use, other, batch=BATCH)
    for name in ("note", "use", "other"):
        schedule = {**found.plan().schedule, name: TaskSchedule(thread_group="io")}
        plan = replace(found.plan(), schedule=schedule)
        refused = pytest.raises(PlanError, match=f"'{name}' uses .*value.*each thread has its own")
        with refused if name != "other" else nullcontext():
            verify(plan, found.tasks, found.effects)


def test_what_one_task_keeps_for_its_thread_lets_it_run_on_any() -> None:
    """Such as a handle, which it opens when there is none; a variable that is only read, too."""
    handles, level = threading.local(), ContextVar("level", default=1.0)

    def decode(ctx: Any) -> None:
        if not hasattr(handles, "scale"):
            handles.scale = 2.0
        ctx.x = ctx.batch * handles.scale * level.get()

    def look(ctx: Any) -> None:
        ctx.y = ctx.x * level.get()

    assert not any(one.own_thread for one in recorded(decode, look, batch=BATCH).effects.values())
    handles.scale = 3.0
    assert recorded(decode, look, batch=BATCH).effects["decode"].own_thread


def test_an_attribute_that_code_may_set_is_written() -> None:
    """Also one that it has only read."""

    def load(ctx: Any) -> None:
        ctx.x, ctx.scale = ctx.batch * 2, 1.0

    def clip(ctx: Any) -> None:
        if ctx.x.sum() > 1e9:
            ctx.x = ctx.x * 0.5
            ctx.scale = 0.5

    def forward(ctx: Any) -> None:
        ctx.y = ctx.x * ctx.scale

    found = recorded(load, clip, forward, batch=BATCH)
    assert writes(found, "clip") == {"ctx.x", "ctx.scale"}
    assert ("forward", "clip", 0) in orders(found)


def test_a_hook_counts_for_the_task_that_runs_it() -> None:
    """In another task's backward, although that task leads to no module."""
    model, sums = nn.Linear(4, 1), {"n": 0}

    def hook(grad: torch.Tensor) -> None:
        if grad.sum() > 1e9:
            sums["n"] += 1

    model.weight.register_hook(hook)

    def load(ctx: Any) -> None:
        ctx.x = ctx.batch * (1 + sums["n"])

    def forward(ctx: Any) -> None:
        ctx.loss = model(ctx.x).sum()

    def backward(ctx: Any) -> None:
        ctx.loss.backward()

    found = recorded(load, forward, backward, batch=BATCH)
    assert "Python value sums" in writes(found, "backward")
    assert ("load", "backward", 1) in orders(found)


def test_a_tensor_that_is_replaced_now_and_then_keeps_its_order() -> None:
    """An attribute that holds a tensor or nothing, such as a hidden state."""

    class Loop:
        hidden: Any = None

        def forward(self, ctx: Any) -> None:
            before = 0 if self.hidden is None else self.hidden
            self.hidden = ctx.y = ctx.batch.sum() + before

        def reset(self, ctx: Any) -> None:
            if ctx.iter_idx % 5 == 4:
                self.hidden = None

    loop = Loop()
    found = recorded(loop.forward, loop.reset, batch=BATCH)
    assert ("forward", "reset", 1) in orders(found)
