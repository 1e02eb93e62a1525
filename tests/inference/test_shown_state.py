"""State that torch shows while tasks use it is restored, and known to those who measure."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from swpipe import DeclaredIO, PipelinePlan, PipelineTask, SWPipeline, TaskProfiler
from swpipe._values.stateful import Owners
from swpipe.errors import UnsavedStateError
from swpipe.profiler.trial import trial_state

BATCH = torch.ones(2, 3)


def shown(*tasks: Any, state: Any = None) -> Owners:
    """Return the owners that a trial of these functions or tasks restores."""
    given = [t if isinstance(t, PipelineTask) else PipelineTask(t.__name__, t) for t in tasks]
    with SWPipeline(PipelinePlan.serial(given), given, device="cpu") as pipe:
        return Owners(trial_state(pipe, BATCH, state).owners)


def names(owners: Owners) -> list[str]:
    return [str(one) for one in owners]


class Hidden:
    """An object whose value is behind a property, at the end of a chain of attributes."""

    def __init__(self, value: Any) -> None:
        vars(self)["a" + "b"] = {"c": [value]}

    @property
    def value(self) -> Any:
        return getattr(self, "".join(["a", "b"]))["c"][0]


def test_modules_and_optimizers_show_wherever_they_are() -> None:
    """Their state shows, too; after the two iterations nothing has changed."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    hidden = Hidden(Hidden((model, optimizer)))

    def train(ctx: Any) -> None:
        model, optimizer = hidden.value.value
        optimizer.zero_grad()
        model(ctx.batch).square().sum().backward()
        optimizer.step()

    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = shown(train)
    assert names(found) == ["Sequential", "Adam"]
    assert [one.owner for one in found] == [model, optimizer]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_memory_that_is_written_shows_and_is_put_back() -> None:
    """Writes through data, a view, and a numpy array's tensor show; reads do not."""
    table, read = torch.zeros(4), torch.ones(3)

    def write(ctx: Any) -> None:
        table[1:].data.add_(1)
        ctx.sum = ctx.batch.mul_(read).sum()

    found = shown(write)
    assert names(found) == ["memory (float32 [4])"]
    assert table.tolist() == [0] * 4
    tasks = [PipelineTask("write", write)]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        TaskProfiler(pipe).profile(BATCH, 1, 1, 2)
    assert table.tolist() == [0] * 4


def test_leaves_show_with_their_gradients() -> None:
    """The parameter belongs to no module and to no optimizer."""
    weight = nn.Parameter(torch.ones(3))

    def backward(ctx: Any) -> None:
        (weight * ctx.batch).sum().backward()

    assert names(shown(backward)) == ["leaf (float32 [3])"]
    assert weight.grad is None
    weight.grad = torch.ones(3)
    shown(backward)
    assert weight.grad.tolist() == [1] * 3


def test_generators_of_the_users_show() -> None:
    """The default generators are always restored."""
    own = torch.Generator().manual_seed(3)
    before, default = own.get_state(), torch.get_rng_state()

    def draw(ctx: Any) -> None:
        ctx.x = torch.rand(2, generator=own) + torch.rand(2)

    assert names(shown(draw)) == ["Generator"]
    assert torch.equal(own.get_state(), before)
    assert torch.equal(torch.get_rng_state(), default)


def test_what_is_declared_comes_first() -> None:
    """Its memory may be an object with a state, such as a scheduler, which nothing else shows."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def train(ctx: Any) -> None:
        (weight * ctx.batch).sum().backward()
        optimizer.step()
        scheduler.step()

    with pytest.raises(UnsavedStateError, match=r"step a scheduler.*state=\[model, optimizer, sch"):
        shown(train)
    io = [DeclaredIO(state="rate", memory=[scheduler])]
    found = shown(PipelineTask("train", train, io=io))
    assert names(found) == ["rate (StepLR)", "SGD"]
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0.5)
    shown(train, state=[weight, optimizer, scheduler])
    assert weight.tolist() == [1] * 3


def test_a_failure_leaves_nothing() -> None:
    """Neither changes nor hooks remain."""
    model = nn.Linear(3, 1)

    def fail(ctx: Any) -> None:
        with torch.no_grad():
            model.weight.add_(model(ctx.batch).sum())
        raise ArithmeticError

    before = model.weight.clone()
    with pytest.raises(ArithmeticError):
        shown(fail)
    assert torch.equal(model.weight, before)
    assert not nn.modules.module._global_forward_pre_hooks
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
