"""What code may do in other iterations counts, although no recorded iteration did it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from swpipe import PipelineTask
from swpipe.inference import record
from tests.inference.helpers import orders, recorded, writes

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
