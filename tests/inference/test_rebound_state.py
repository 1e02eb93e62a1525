"""State that each iteration replaces: a reader comes after the task that makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.errors import PlanError

BATCHES = [torch.full((1,), float(number)) for number in range(12)]


class State(NamedTuple):
    """Functions that read and replace a state of one number."""

    read: Callable[[], torch.Tensor]
    replace: Callable[[torch.Tensor], Any]


def _in_a_list() -> State:
    held = [torch.zeros(1)]
    return State(lambda: held[0], lambda new: held.__setitem__(0, new))


def _by_data() -> State:
    held = torch.zeros(1)
    return State(lambda: held, lambda new: setattr(held, "data", new))


def _by_set() -> State:
    held = torch.zeros(1)
    return State(lambda: held, held.set_)  # type: ignore[call-overload]


STATES = [_in_a_list, _by_data, _by_set]


def tasks_of(state: State) -> list[PipelineTask]:
    """Return a task that reads the state, and one that replaces it."""

    def read(ctx: IterContext) -> None:
        ctx.out = (ctx.batch + state.read()).item()

    def train(ctx: IterContext) -> None:
        state.replace(state.read() * 0.5 + ctx.batch)

    return [PipelineTask("read", read), PipelineTask("train", train)]


AHEAD = PipelinePlan(
    {"decode": TaskSchedule(thread_group="io"), "train": TaskSchedule(1)},
    deps=[("train", "decode")],
    pipeline_depth=4,
)


def ahead(depth: int, group: str, **order: Any) -> PipelinePlan:
    """Return a plan with the reader a stage ahead, and first within a period."""
    schedule = {"read": TaskSchedule(thread_group=group), "train": TaskSchedule(1)}
    given = {"order": ["read", "train"], **order}
    return PipelinePlan(schedule, deps=[("train", "read")], pipeline_depth=depth, **given)


def outputs(plan: PipelinePlan, tasks: list[PipelineTask], **options: Any) -> list[float]:
    """Return the state that the reader found in each iteration."""
    with SWPipeline(plan, tasks, device="cpu", **options) as pipe:
        return [ctx.out for ctx in pipe.iterate(BATCHES)]


@pytest.mark.parametrize(("depth", "group"), [(2, "io"), (4, "io"), (4, "default")])
@pytest.mark.parametrize("make", STATES)
def test_a_reader_ahead_is_refused_at_the_first_iteration_that_shows_it(
    make: Callable[[], State], depth: int, group: str
) -> None:
    """The limit on iterations in flight may keep the two apart.

    A reader that waits for it gives the serial numbers, checked in all iterations.
    """
    done: list[int] = []
    with SWPipeline(ahead(depth, group), tasks_of(make()), device="cpu") as pipe:
        with pytest.raises(PlanError, match="check_effects") as caught:
            done.extend(ctx.iter_idx for ctx in pipe.iterate(BATCHES))
    # What the first ``depth`` iterations may read was there before the run.
    assert len(done) <= depth
    assert "'read' on iteration i must come after 'train' on iteration i - 1" in str(caught.value)
    serial = tasks_of(make())
    wanted = outputs(PipelinePlan.serial(serial), serial)
    plan = ahead(depth, group, cross_iter_deps=[("read", "train")], order=[])
    assert outputs(plan, tasks_of(make()), check_effects=True) == wanted


@pytest.mark.parametrize("waits", [True, False])
def test_a_table_that_is_made_once(waits: bool) -> None:
    """Every later reader must come after the iteration before, on which it was made."""
    made: list[torch.Tensor] = []

    def read(ctx: IterContext) -> None:
        ctx.out = made[0].sum().item() if made else 0.0

    def train(ctx: IterContext) -> None:
        if not made:
            made.append(ctx.batch + 1)

    tasks = [PipelineTask("read", read), PipelineTask("train", train)]
    order = {"cross_iter_deps": [("read", "train")], "order": []} if waits else {}
    plan = ahead(4, "io", **order)
    if waits:
        assert outputs(plan, tasks, check_effects=True) == [0.0] + [1.0] * 11
    else:
        with pytest.raises(PlanError, match="'read' on iteration i must come after 'train'"):
            outputs(plan, tasks)


def test_a_table_made_by_the_first_of_two_that_the_plan_orders_within_an_iteration() -> None:
    """The task that makes it may run ahead: nothing replaces it."""
    made: list[torch.Tensor] = []

    def decode(ctx: IterContext) -> None:
        if not made:
            made.append(torch.arange(4.0))
        ctx.encoded = ctx.batch + made[0]

    def train(ctx: IterContext) -> None:
        ctx.out = (ctx.encoded - made[0]).sum().item()

    tasks = [PipelineTask("decode", decode), PipelineTask("train", train)]
    found = outputs(AHEAD, tasks, check_effects=True)
    assert found == [4.0 * number for number in range(len(BATCHES))]


def test_what_a_task_keeps_of_its_last_context() -> None:
    """Another task made it on an earlier iteration, and may be ahead."""
    last: list[torch.Tensor] = [torch.zeros(1)]

    def decode(ctx: IterContext) -> None:
        ctx.decoded = 2 * ctx.batch

    def train(ctx: IterContext) -> None:
        ctx.out = (ctx.decoded - last[0]).item()
        last[0] = ctx.decoded

    tasks = [PipelineTask("decode", decode), PipelineTask("train", train)]
    assert outputs(AHEAD, tasks, check_effects=True) == [0.0] + [2.0] * 11


def test_what_is_used_up_by_the_one_that_reads_it() -> None:
    """Its memory is freed when the reader has returned."""
    box: list[torch.Tensor] = []

    def take(ctx: IterContext) -> None:
        ctx.out = box.pop(0).sum().item() if len(box) > 1 else 0.0

    def fill(ctx: IterContext) -> None:
        box.append(ctx.batch + 1)

    tasks = [PipelineTask("take", take), PipelineTask("fill", fill)]
    schedule = {"take": TaskSchedule(), "fill": TaskSchedule(1)}
    plan = PipelinePlan(schedule, deps=[("fill", "take")], order=["take", "fill"])
    with pytest.raises(PlanError, match="'take' on iteration i must come after 'fill'"):
        outputs(plan, tasks)


def test_gradients_that_are_made_every_fourth_iteration() -> None:
    """They are accumulated on the iterations between, and the optimizer uses them then."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def decode(ctx: IterContext) -> None:
        ctx.x = ctx.batch + 1

    def train(ctx: IterContext) -> None:
        loss = model(ctx.x).square().sum()
        loss.backward()
        ctx.out = loss.item()

    def step(ctx: IterContext) -> None:
        if ctx.iter_idx % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()

    tasks = [PipelineTask(f.__name__, f) for f in (decode, train, step)]
    schedule = {**AHEAD.schedule, "step": TaskSchedule(1)}
    plan = replace(AHEAD, schedule=schedule, deps=[*AHEAD.deps, ("step", "train")])
    assert len(outputs(plan, tasks, check_effects=True)) == len(BATCHES)
