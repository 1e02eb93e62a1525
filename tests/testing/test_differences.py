"""``first_difference`` names the first task, iteration, attribute and element that differ."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from swpipe import PipelinePlan, PipelineTask, TaskSchedule
from swpipe.testing import Difference, Loop, first_difference

Maker = Callable[[], Loop]


class Job:
    """A job of decode, norm and train on rows of two columns; each part may be replaced."""

    def __init__(self, **parts: Callable[[Any], None]) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.parts = parts

    def decode(self, ctx: Any) -> None:
        ctx.x = ctx.batch + 1

    def norm(self, ctx: Any) -> None:
        ctx.x = ctx.x / 2

    def train(self, ctx: Any) -> None:
        ctx.loss = self.model(ctx.x).square().mean()
        self.optimizer.zero_grad()
        ctx.loss.backward()
        self.optimizer.step()

    def loop(self, **options: Any) -> Loop:
        draws = torch.Generator().manual_seed(1)
        loader = [torch.rand(2, 2, generator=draws) for _ in range(6)]
        names = ("decode", "norm", "train")
        given = {name: self.parts.get(name, getattr(self, name)) for name in names}
        tasks = [PipelineTask(name, fn, pure=name != "train") for name, fn in given.items() if fn]
        state = lambda: [self.model, self.optimizer]  # noqa: E731
        return Loop(**{"loader": loader, "tasks": tasks, "state": state, **options})


def make(**options: Any) -> Maker:
    return lambda: Job().loop(**options)


def with_part(**parts: Any) -> Maker:
    return lambda: Job(**parts).loop()


AHEAD = PipelinePlan(
    {
        "decode": TaskSchedule(0, thread_group="io"),
        "norm": TaskSchedule(1, thread_group="io"),
        "train": TaskSchedule(2),
    },
    deps=[("norm", "decode"), ("train", "norm")],
    cross_iter_deps=[("train", "train")],
)


def found(a: Maker, b: Maker, **options: Any) -> Difference:
    difference = first_difference(a, b, **options)
    assert difference is not None
    return difference


def test_the_same_loop_does_not_differ() -> None:
    """It differs neither from itself nor under another plan, with or without its state."""
    torch.seed()
    assert first_difference(make(), make()) is None
    assert first_difference(make(), make(plan=AHEAD)) is None
    assert first_difference(make(state=list), make(state=list, plan=AHEAD)) is None


def test_a_wrong_task_is_named() -> None:
    """Later tasks, which compute on its numbers, are not named."""

    def norm(ctx: Any) -> None:
        ctx.x = ctx.x / 2
        if ctx.iter_idx == 3:
            ctx.x[1, 0] = 7.0

    def in_place(ctx: Any) -> None:
        ctx.x.mul_(0.25)  # the attribute is bound by another task

    assert found(make(), with_part(norm=in_place)).task == "norm"
    seen = found(make(), with_part(norm=norm))
    assert (seen.iteration, seen.task, seen.attribute) == (3, "norm", "ctx.x")
    assert (seen.element, seen.b) == ((1, 0), 7.0)
    said = str(seen)
    assert said.startswith("iteration 3, task 'norm': ctx.x[1, 0] is 0.")
    assert said.endswith("in a, and 7.0 in b")


def test_what_a_task_changes_outside_is_its_own() -> None:
    """The optimizer steps twice; no attribute shows it in this iteration."""

    def make_twice() -> Loop:
        job = Job()

        def train(ctx: Any) -> None:
            job.train(ctx)
            if ctx.iter_idx == 2:
                job.optimizer.step()

        job.parts = {"train": train}
        return job.loop()

    for b in (make_twice, lambda: replace(make_twice(), plan=AHEAD)):
        seen = found(make(), b)
        assert (seen.iteration, seen.task) == (2, "train")
        assert seen.attribute.startswith("state()[0]['weight']")
    assert found(make(state=list), lambda: replace(make_twice(), state=list)).iteration == 3

    def make_body() -> Loop:
        job = Job()

        def body(ctx: Any) -> None:
            if ctx.iter_idx == 1:
                nn.init.zeros_(job.model.bias)

        return job.loop(body=body)

    seen = found(make(), make_body)  # the body's changes come after the tasks
    assert (seen.iteration, seen.task) == (1, "<retire>")
    assert seen.attribute == "state()[0]['bias']"


def test_a_plan_that_forgot_a_dependence_is_found() -> None:
    """The caller changes what a task ahead has read: that task differs."""

    def scaled(plan: PipelinePlan | None) -> Loop:
        job, scale = Job(), [1.0]

        def decode(ctx: Any) -> None:
            ctx.x = ctx.batch * scale[0]

        def body(ctx: Any) -> None:
            scale[0] += 1

        job.parts = {"decode": decode}
        return job.loop(body=body, plan=plan)

    seen = found(lambda: scaled(None), lambda: scaled(AHEAD))
    assert (seen.task, seen.attribute) == ("decode", "ctx.x")
    assert seen.iteration in (1, 2)


def test_loaders_that_differ_are_told_as_such() -> None:
    """Their batches and their number differ."""
    short = make(loader=[torch.zeros(2, 2)])
    seen = found(short, make(loader=[torch.zeros(2, 2), torch.ones(2, 2)]))
    said = str(seen)
    assert said.startswith("iteration 1, task '<pull>': ctx.batch is nothing in a, and tensor(")
    assert first_difference(short, short) is None
    assert found(short, make(loader=[torch.ones(2, 2)])).task == "<pull>"
    assert first_difference(short, make(loader=[torch.zeros(2, 2)] * 2), iterations=1) is None


def test_tasks_that_one_side_lacks_are_left_out() -> None:
    """Everything that both sides return is compared."""

    def both(ctx: Any) -> None:
        ctx.x = (ctx.batch + 1) / 2

    merged = with_part(decode=both, norm=None)
    seen = found(make(), merged)
    assert (seen.iteration, seen.task) == (0, "decode")

    def renamed(third: float) -> Loop:
        loop = Job().loop()
        tasks = [replace(task, name=f"my {task.name}") for task in loop.tasks]
        late = PipelineTask("late", lambda ctx: setattr(ctx, "more", third))
        return replace(loop, tasks=[*tasks, late])

    assert first_difference(make(), lambda: renamed(1.0)) is None
    tasks_differ = found(lambda: renamed(1.0), lambda: renamed(2.0))
    assert (tasks_differ.task, tasks_differ.attribute) == ("late", "ctx.more")


def test_a_deleted_attribute_is_a_difference() -> None:
    """If both delete it, it is none."""

    def keep(ctx: Any) -> None:
        ctx.y = ctx.x

    def drop(ctx: Any) -> None:
        ctx.y = ctx.x
        del ctx.batch

    seen = found(with_part(norm=keep), with_part(norm=drop))
    assert (seen.task, seen.attribute) == ("norm", "ctx.batch")
    assert str(seen).endswith("is nothing in a, and deleted in b")
    assert first_difference(with_part(norm=drop), with_part(norm=drop)) is None


def test_rounding_may_be_allowed() -> None:
    """This is for another implementation; no other difference is allowed."""

    def norm(ctx: Any) -> None:
        ctx.x = ctx.x / 2 * (1 + 1e-6)

    assert found(make(state=list), with_part(norm=norm)).task == "norm"
    assert first_difference(make(), with_part(norm=norm), rtol=1e-2, atol=1e-4) is None

    def far(ctx: Any) -> None:
        ctx.x = ctx.x / 2 * 1.1

    assert found(make(), with_part(norm=far), rtol=1e-2).element == (0, 0)


def test_a_failure_comes_out_as_itself() -> None:
    """It has a note of its place."""

    def norm(ctx: Any) -> None:
        if ctx.iter_idx == 2:
            raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError) as caught:
        first_difference(make(), with_part(norm=norm))
    assert "task 'norm', iteration 2" in "".join(caught.value.__notes__)


def test_copies_are_made_on_the_task_s_thread() -> None:
    """They are made immediately, before another thread can change the results."""
    threads = set()

    class Watched:
        def __deepcopy__(self, memo: Any) -> Watched:
            threads.add(threading.current_thread() is threading.main_thread())
            return self

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = object.__hash__

    def norm(ctx: Any) -> None:
        ctx.watched = Watched()

    loop = with_part(norm=norm)
    assert first_difference(lambda: replace(loop(), plan=AHEAD), loop) is None
    assert threads == {True, False}
