"""Ordinary training loops that do something else in some iterations, each split into tasks.

A loop is a function that makes its tasks anew, and a function that returns all that they leave.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from swpipe import PipelineTask

Fn = Callable[[Any], None]


class Loop(NamedTuple):
    """Tasks, and a function that returns the state that they train or count."""

    tasks: list[PipelineTask]
    state: Callable[[], Any]


class Parts:
    """A small model, its optimizer, and the four usual tasks.

    Args:
        layers: The model's layers; two linear ones by default.
    """

    def __init__(self, *layers: nn.Module) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(layers or (nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)

    def functions(self) -> dict[str, Fn]:
        """Functions named load, forward, backward and step, which close over the parts."""
        model, optimizer = self.model, self.optimizer

        def load(ctx: Any) -> None:
            ctx.x = ctx.batch * 2

        def forward(ctx: Any) -> None:
            ctx.loss = (model(ctx.x) - ctx.x.sum(1, keepdim=True)).square().mean()

        def backward(ctx: Any) -> None:
            optimizer.zero_grad()
            ctx.loss.backward()

        def step(ctx: Any) -> None:
            optimizer.step()

        return {"load": load, "forward": forward, "backward": backward, "step": step}

    def loop(self, state: Callable[[], Any] = list, **more: Fn) -> Loop:
        """The usual tasks, of which ``more`` replaces some and adds others at the end."""
        functions = self.functions() | more
        both = lambda: (copy.deepcopy(self.model.state_dict()), copy.deepcopy(state()))  # noqa: E731
        return Loop([PipelineTask(name, fn) for name, fn in functions.items()], both)


def accumulating(every: int) -> Loop:
    """Gradients of several batches for each step."""
    parts = Parts()
    optimizer = parts.optimizer

    def backward(ctx: Any) -> None:
        ctx.loss.backward()

    def step(ctx: Any) -> None:
        if (ctx.iter_idx + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()

    return parts.loop(backward=backward, step=step)


def scheduler() -> Loop:
    """The learning rate falls every 10 iterations."""
    parts = Parts()
    schedule = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1, 0.5)

    def lower(ctx: Any) -> None:
        if ctx.iter_idx % 10 == 9:
            schedule.step()

    return parts.loop(lower=lower)


def checkpoint() -> Loop:
    """A copy of the model is kept now and then."""
    parts = Parts()
    model, kept = parts.model, []

    def save(ctx: Any) -> None:
        if ctx.iter_idx % 5 == 4:
            kept.append(copy.deepcopy(model.state_dict()))

    return parts.loop(lambda: kept, save=save)


def evaluation(*layers: nn.Module) -> Loop:
    """The model is evaluated every 4 iterations, in evaluation mode."""
    parts = Parts(*layers)
    model, results = parts.model, []
    held_out = torch.ones(3, 4)

    def evaluate(ctx: Any) -> None:
        if ctx.iter_idx % 4 == 3:
            model.eval()
            with torch.no_grad():
                results.append(model(held_out).sum())
            model.train()

    return parts.loop(lambda: results, evaluate=evaluate)


def batch_norm() -> Loop:
    """An evaluation, with running statistics."""
    torch.manual_seed(1)
    return evaluation(nn.Linear(4, 4), nn.BatchNorm1d(4))


def mode() -> Loop:
    """Each iteration ends with an evaluation, in evaluation mode."""
    torch.manual_seed(1)
    parts = Parts(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, held_out = parts.model, torch.ones(3, 4)

    def evaluate(ctx: Any) -> None:
        model.eval()
        with torch.no_grad():
            ctx.score = model(held_out).sum()
        model.train()

    return parts.loop(evaluate=evaluate)


def counter() -> Loop:
    """A Python number counts iterations; another task skips by it."""
    parts = Parts()
    optimizer, count = parts.optimizer, 0

    def tally(ctx: Any) -> None:
        nonlocal count
        count += 1

    def step(ctx: Any) -> None:
        if count % 3 == 2:
            optimizer.step()

    return parts.loop(lambda: count, step=step, tally=tally)


def log() -> Loop:
    """Losses go to a list, and the step looks at its end."""
    parts = Parts()
    optimizer, losses = parts.optimizer, []

    def note(ctx: Any) -> None:
        losses.append(ctx.loss.item())

    def step(ctx: Any) -> None:
        if not losses or losses[-1] < 1000:
            optimizer.step()

    return parts.loop(lambda: losses, note=note, step=step)


def reset() -> Loop:
    """The momentum is forgotten in every 7th iteration."""
    parts = Parts()
    optimizer = parts.optimizer

    def forget(ctx: Any) -> None:
        if ctx.iter_idx % 7 == 6:
            optimizer.state.clear()

    return parts.loop(forget=forget)


def reset_of_a_sum() -> Loop:
    """A running sum of losses is set to 0 in every 7th iteration by another task."""
    parts = Parts()
    total = {"sum": 0.0}

    def add(ctx: Any) -> None:
        total["sum"] += ctx.loss.item()
        ctx.total = total["sum"]

    def clear(ctx: Any) -> None:
        if ctx.iter_idx % 7 == 6:
            total["sum"] = 0.0

    return parts.loop(lambda: total, add=add, clear=clear)


def freezing() -> Loop:
    """The first layer is frozen at the 10th iteration."""
    parts = Parts()
    model = parts.model

    def freeze(ctx: Any) -> None:
        if ctx.iter_idx == 9:
            model[0].requires_grad_(False)
            model[0].zero_grad()

    return parts.loop(freeze=freeze)


def best_loss() -> Loop:
    """The rate is lowered when the loss is the best so far."""
    parts = Parts()
    optimizer, best = parts.optimizer, float("inf")

    def lower(ctx: Any) -> None:
        nonlocal best
        if ctx.loss.item() < best:
            best = ctx.loss.item()
            optimizer.param_groups[0]["lr"] *= 0.9

    return parts.loop(lambda: best, lower=lower)


def replaced_weight() -> Loop:
    """A weight is replaced by another in every 5th iteration."""
    parts = Parts()
    model = parts.model

    def replace(ctx: Any) -> None:
        if ctx.iter_idx % 5 == 4:
            with torch.no_grad():
                model[0].weight = nn.Parameter(model[0].weight * 0.5)

    return parts.loop(replace=replace)


def moving_average() -> Loop:
    """An average of the model is updated in every 3rd iteration."""
    parts = Parts()
    model, average = parts.model, copy.deepcopy(parts.model)

    def update(ctx: Any) -> None:
        if ctx.iter_idx % 3 == 2:
            with torch.no_grad():
                for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(new, 0.1)

    return parts.loop(average.state_dict, average=update)


_CACHE: dict[str, Any] = {}


def module_cache() -> Loop:
    """A cache at module level is filled by one task and used by another every 4th iteration."""
    _CACHE.clear()
    parts = Parts()
    optimizer = parts.optimizer

    def fill(ctx: Any) -> None:
        _CACHE["scale"] = float(ctx.x.sum())

    def backward(ctx: Any) -> None:
        optimizer.zero_grad()
        if ctx.iter_idx % 4 == 3:
            ctx.loss = ctx.loss * _CACHE.get("scale", 1.0)
        ctx.loss.backward()

    return parts.loop(lambda: _CACHE, backward=backward, fill=fill)


def two_optimizers() -> Loop:
    """The second layer's optimizer steps in every 3rd iteration."""
    parts = Parts()
    first = torch.optim.SGD(parts.model[0].parameters(), 0.05)
    second = torch.optim.SGD(parts.model[-1].parameters(), 0.05)

    def step_second(ctx: Any) -> None:
        if ctx.iter_idx % 3 == 2:
            second.step()

    def step(ctx: Any) -> None:
        first.step()

    return parts.loop(step=step, step_second=step_second)


def adversarial() -> Loop:
    """Two models; the generator is trained in every 3rd iteration."""
    parts = Parts()
    judge = parts.model
    maker = nn.Linear(4, 4)
    improve = torch.optim.SGD(maker.parameters(), 0.05)

    def make(ctx: Any) -> None:
        if ctx.iter_idx % 3 == 2:
            improve.zero_grad()
            judge(maker(ctx.x)).mean().backward()
            improve.step()

    return parts.loop(maker.state_dict, make=make)


def tied() -> Loop:
    """Two layers share a weight, which a task scales in every 4th iteration."""
    torch.manual_seed(1)
    parts = Parts(nn.Linear(4, 4), nn.Linear(4, 4))
    parts.model[1].weight = parts.model[0].weight
    layer = parts.model[1]

    def scale(ctx: Any) -> None:
        if ctx.iter_idx % 4 == 3:
            with torch.no_grad():
                layer.weight.mul_(0.9)

    return parts.loop(scale=scale)


def generator() -> Loop:
    """Two tasks draw from one generator, one of them in every 4th iteration."""
    parts = Parts()
    draws = torch.Generator().manual_seed(3)

    def load(ctx: Any) -> None:
        ctx.x = ctx.batch + torch.rand(4, generator=draws)

    def sample(ctx: Any) -> None:
        ctx.sample = torch.rand(1, generator=draws) if ctx.iter_idx % 4 == 3 else 0

    return parts.loop(draws.get_state, load=load, sample=sample)


def printing() -> Loop:
    """The loss is kept in every 6th iteration; no task shares what keeps it."""
    parts = Parts()
    kept: list[float] = []

    def report(ctx: Any) -> None:
        if ctx.iter_idx % 6 == 5:
            kept.append(ctx.loss.item())

    return parts.loop(lambda: kept, report=report)


def held_out_loader() -> Loop:
    """A pass over a loader draws a seed for it, in every 6th iteration; the forward drops."""
    torch.manual_seed(1)
    parts = Parts(nn.Linear(4, 4), nn.Tanh(), nn.Dropout())
    held_out = DataLoader(TensorDataset(torch.arange(6.0)), 2)
    sums: list[float] = []

    def evaluate(ctx: Any) -> None:
        if ctx.iter_idx % 6 == 5:
            sums.append(sum(float(rows.sum()) for (rows,) in held_out))

    return parts.loop(lambda: sums, evaluate=evaluate)


LOOPS: dict[str, Callable[[], Loop]] = {
    "accumulation by 3": lambda: accumulating(3),
    "accumulation by 4": lambda: accumulating(4),
    **{
        make.__name__: make
        for make in (
            scheduler, checkpoint, evaluation, batch_norm, mode, counter, log, reset,
            reset_of_a_sum, freezing, best_loss, replaced_weight, moving_average, module_cache,
            two_optimizers,
            adversarial, tied, generator, printing, held_out_loader,
        )
    },
}  # fmt: skip
