"""The serial run, which calls every task on the calling thread, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from swpipe._distributed.rank_checks import tell_failure
from swpipe._engine.iterations import Engine, reset_states
from swpipe._engine.observers import Observer, observing
from swpipe._engine.release import begin, finish, let_go
from swpipe.core.context import C, TypedContext
from swpipe.core.task import PipelineTask
from swpipe.errors import add_note
from swpipe.program import Instruction


def run_serially(engine: Engine, ctx: C) -> C:
    """Run every task on one context, in serial order, and return it.

    Raises:
        BaseException: The error of a task, with a note of the task and the iteration.
    """
    observers = engine.observers()
    has_streams = engine.device.has_streams
    # The places of the releases differ from the pipeline's: here the last user is the last in
    # serial order.
    releases = engine.releases and engine.releases.serially
    if releases is not None:
        begin(ctx)
    for task in engine.tasks.values():
        try:
            # The plain call is the common case: the context managers would cost more than a short
            # task.
            if observers or has_streams or task.random:
                _run_within(engine, observers, task, ctx)
            else:
                _call(engine, task, ctx)
        except BaseException as error:
            place = f"at task {task.name!r}, iteration {ctx.iter_idx}, serially"
            add_note(error, f"swpipe: {place}")
            # As in a pipelined run that fails: no state of a task refers to the failed iteration
            # any more.
            reset_states(engine.tasks.values(), error)
            tell_failure(error)
            raise
        if releases is not None:
            _drop(engine, let_go(ctx, task.name, releases))
    if releases is not None:
        _drop(engine, finish(ctx, releases))
    return ctx


def _run_within(
    engine: Engine, observers: Sequence[Observer], task: PipelineTask, ctx: TypedContext
) -> None:
    """Run a task on the caller's stream, with its seed and with observers, as needed."""
    device = engine.device
    i = ctx.iter_idx
    seeded = engine.seeds.seeded(task.name, i) if task.random else nullcontext()
    # Whatever the plan says, the task is on the caller's thread and stream.
    ins = Instruction(task.name, stage=0, lane=0, position=0)
    with device.on(device.current_stream()), seeded, observing(observers, ins, i):
        _call(engine, task, ctx)


def _drop(engine: Engine, values: list[Any]) -> None:
    """Release values, some of which may have been made on another stream."""
    engine.device.hold(values, (engine.device.current_stream(),))


def _call(engine: Engine, task: PipelineTask, ctx: TypedContext) -> None:
    if task.name in engine.shortcuts.names:
        engine.shortcuts.run(task, ctx)
    else:
        task.fn(ctx)
