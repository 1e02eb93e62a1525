"""Guarantees G2 and G3 with the real allocator and real streams; each case fails unguarded.

A tensor made on stream "side" is a block of 32 MiB. It returns to that stream when the last
reference is dropped, and the next tensor there reuses it, even if it is still being read::

    side     make i ............. make i + 1, in the same block unless something holds it
    late     ~~~ spinning ~~~~~~~~~~~~~~~ read i
    host     make i  read i  drop i  make i + 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from swpipe import IterContext, PipelinePlan, PipelineTask, TaskSchedule
from swpipe._engine import bind as steps
from swpipe._engine import run as executor
from swpipe._engine.run import Run
from tests.device.accelerator.work import extremes, filled, run, spin, warm_up, wrong
from tests.support import unguarded

ITERATIONS = 12
LATE_MS = 5.0


def make(ctx: IterContext) -> None:
    """Make a block with the iteration's number as its value."""
    ctx.x = filled(ctx.iter_idx + 1)


class Reader:
    """A task that reads ``ctx.x`` late, and remembers the values."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def __call__(self, ctx: IterContext) -> None:
        spin(LATE_MS)
        self.seen[ctx.iter_idx] = extremes(ctx.x)


def event_waits() -> list[int]:
    """Read on one stream what is made late on another."""
    seen: dict[int, Tensor] = {}

    def make_late(ctx: IterContext) -> None:
        spin(LATE_MS)
        make(ctx)

    def read(ctx: IterContext) -> None:
        seen[ctx.iter_idx] = extremes(ctx.x)

    plan = PipelinePlan(
        {
            PipelineTask("make", make_late): TaskSchedule(0, "side"),
            PipelineTask("read", read): TaskSchedule(1, "late"),
        },
        deps=[("read", "make")],
    )
    run(plan, range(ITERATIONS))
    return wrong(seen)


def sink_waits() -> list[int]:
    """Read in the caller what a sink on another stream makes late."""
    seen: dict[int, Tensor] = {}

    def make_late(ctx: IterContext) -> None:
        spin(LATE_MS)
        make(ctx)

    def look(ctx: IterContext) -> None:
        seen[ctx.iter_idx] = extremes(ctx.x)

    run(
        PipelinePlan({PipelineTask("make", make_late): TaskSchedule(0, "side")}),
        range(ITERATIONS),
        look,
    )
    return wrong(seen)


def deleted_attribute() -> list[int]:
    """Delete an attribute that another stream reads later."""
    read = Reader()
    plan = PipelinePlan(
        {
            PipelineTask("make", make): TaskSchedule(0, "side"),
            PipelineTask("read", read): TaskSchedule(1, "late"),
            PipelineTask("drop", lambda ctx: delattr(ctx, "x")): TaskSchedule(1),
        },
        deps=[("read", "make"), ("drop", "read")],
    )
    run(plan, range(ITERATIONS))
    return wrong(read.seen)


def retired_while_read() -> list[int]:
    """Drop a context that a stream reads later."""
    read = Reader()
    plan = PipelinePlan(
        {
            PipelineTask("make", make): TaskSchedule(0, "side"),
            PipelineTask("read", read): TaskSchedule(1, "late"),
        },
        deps=[("read", "make")],
        pipeline_depth=3,
    )
    run(plan, range(ITERATIONS))
    return wrong(read.seen)


def _with_keep(first: Callable[[IterContext], None], then: Callable[[IterContext], None]) -> None:
    """Run a plan without kept attributes: ``ctx.x`` is deleted after ``first``."""
    run(
        PipelinePlan(
            {
                PipelineTask("make", make, reads=[]): TaskSchedule(0, "side"),
                PipelineTask("first", first, reads=["x"]): TaskSchedule(1, "late"),
                PipelineTask("then", then, reads=["y"]): TaskSchedule(2, "late"),
            },
            deps=[("first", "make"), ("then", "first")],
            pipeline_depth=4,
            keep=[],
        ),
        range(ITERATIONS),
    )


def went_while_read() -> list[int]:
    """Release an attribute after its last user, while a stream still reads it."""
    read = Reader()
    _with_keep(read, lambda ctx: None)
    return wrong(read.seen)


def saved_for_backward() -> list[int]:
    """Release an attribute that autograd saved, and reads late in the backward."""
    seen: dict[int, Tensor] = {}
    weight = filled(1.0).requires_grad_()

    def forward(ctx: IterContext) -> None:
        ctx.y = (weight * ctx.x).sum()

    def backward(ctx: IterContext) -> None:
        spin(LATE_MS)
        ctx.y.backward()
        seen[ctx.iter_idx] = extremes(weight.grad)
        weight.grad = None

    _with_keep(forward, backward)
    return wrong(seen)


# ------------------------------------------------------------------------- taking guards away


def _no_wait(run: Run, ins: Any, stream: Any) -> Callable[[int], None]:
    return lambda i: None


def _without_event_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(steps, "wait_for_events", _no_wait)


def _without_sink_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(executor, "wait_for_events", _no_wait)


@dataclass(frozen=True)
class Guard:
    """A guard: the case that needs it, and a function that removes it."""

    case: Callable[[], list[int]]
    remove: Callable[[pytest.MonkeyPatch], None]


GUARDS = (
    Guard(event_waits, _without_event_waits),
    Guard(sink_waits, _without_sink_waits),
    Guard(deleted_attribute, unguarded.hold_on_dropped),
    Guard(retired_while_read, unguarded.hold_at_retirement),
    Guard(went_while_read, unguarded.waiting),
    Guard(saved_for_backward, unguarded.hold_on_shared),
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.case.__name__)
def test_every_value_is_right_only_with_the_guard(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stream reads too early, and no block is reused early; this device makes both certain."""
    assert guard.case() == []
    guard.remove(monkeypatch)
    assert guard.case() != []


def test_the_allocator_gives_a_freed_block_again_at_once() -> None:
    """These tests rely on it: a stream that frees a block gets it back with its next tensor."""
    warm_up()
    first = filled(1.0)
    place = first.data_ptr()
    del first
    assert filled(2.0).data_ptr() == place
