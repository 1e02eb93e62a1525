"""The serial run, which calls every task on the calling thread, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from swpipe._distributed.rank_checks import tell_failure
from swpipe._engine.iterations import Engine, reset_states
from swpipe._engine.observers import Observer, observing
from swpipe._engine.release import begin, finish, let_go
from swpipe.core.context import C, TypedContext
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.core.task import PipelineTask
from swpipe.errors import add_note
from swpipe.program import Instruction, compile_plan


class SerialLane:
    """A runner of some tasks, serially and in the given order."""

    def __init__(self, tasks: Sequence[PipelineTask]) -> None:
        self._tasks = tuple(tasks)

    def run(self, engine: Engine, ctx: C) -> C:
        """Run every task on one context, and return it.

        Raises:
            BaseException: The error of a task, with a note of the task and the iteration.
        """
        observers = engine.observers()
        has_streams = engine.device.has_streams
        # The places of the releases differ from the pipeline's: here the last user is the last in
        # the list.
        releases = engine.releases and engine.releases.serially
        if releases is not None:
            begin(ctx)
        for task in self._tasks:
            try:
                # The plain call is the common case: the context managers would cost more than a
                # short task.
                if observers or has_streams or task.random:
                    self._run_within(engine, observers, task, ctx)
                else:
                    _call(engine, task, ctx)
            except BaseException as error:
                place = f"at task {task.name!r}, iteration {ctx.iter_idx}, serially"
                add_note(error, f"swpipe: {place}")
                # As in a pipelined run that fails: no state of a task refers to the failed
                # iteration any more.
                reset_states(self._tasks, error)
                tell_failure(error)
                raise
            if releases is not None:
                _drop(engine, let_go(ctx, task.name, releases))
        if releases is not None:
            _drop(engine, finish(ctx, releases))
        return ctx

    def _run_within(
        self, engine: Engine, observers: Sequence[Observer], task: PipelineTask, ctx: TypedContext
    ) -> None:
        """Run a task on the caller's stream, with its seed and with observers, as needed."""
        device = engine.device
        i = ctx.iter_idx
        seeded = engine.seeds.seeded(task.name, i) if task.random else nullcontext()
        observed = observing(observers, self._instructions[task.name], i)
        with device.on(device.current_stream()), seeded, observed:
            _call(engine, task, ctx)

    @cached_property
    def _instructions(self) -> dict[str, Instruction]:
        """The instructions that observers get: every task on the caller's thread and stream."""
        serial = resolve_plan(PipelinePlan.serial(self._tasks))
        return compile_plan(serial, streams=False).instructions


def _drop(engine: Engine, values: list[Any]) -> None:
    """Release values, some of which may have been made on another stream."""
    engine.device.hold(values, (engine.device.current_stream(),))


def _call(engine: Engine, task: PipelineTask, ctx: TypedContext) -> None:
    if task.name in engine.shortcuts.names:
        engine.shortcuts.run(task, ctx)
    else:
        task.fn(ctx)
