"""The serial run: every task on the calling thread, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property

from swpipe._distributed.rank_checks import tell_failure
from swpipe._engine.iterations import Engine
from swpipe._engine.observers import observing
from swpipe._engine.program import Instruction, compile_plan
from swpipe._engine.resets import reset_states
from swpipe.core.context import C, TypedContext
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.core.task import PipelineTask
from swpipe.errors import add_note


class SerialLane:
    """Runs iterations of some tasks, in the order given."""

    def __init__(self, tasks: Sequence[PipelineTask]) -> None:
        self._tasks = tuple(tasks)

    def run(self, engine: Engine, ctx: C) -> C:
        """Run every task on one context, and return it.

        Raises:
            BaseException: Whatever a task raised, with a note of where.
        """
        observers, device = engine.observers(), engine.device
        for task in self._tasks:
            try:
                with device.on(device.current_stream()):
                    if observers or task.random:
                        ins, i = self._instructions[task.name], ctx.iter_idx
                        seeded = engine.seeds.seeded(task.name, i) if task.random else nullcontext()
                        with seeded, observing(observers, ins, i):
                            _call(engine, task, ctx)
                    else:
                        _call(engine, task, ctx)
            except BaseException as error:
                place = f"at task {task.name!r}, iteration {ctx.iter_idx}, serially"
                add_note(error, f"swpipe: {place}")
                reset_states(self._tasks, error)
                tell_failure(error)
                raise
        return ctx

    @cached_property
    def _instructions(self) -> dict[str, Instruction]:
        """What observers get: every task is on the caller's thread and stream."""
        serial = resolve_plan(PipelinePlan.serial(self._tasks))
        return compile_plan(serial, streams=False).instructions


def _call(engine: Engine, task: PipelineTask, ctx: TypedContext) -> None:
    if task.name in engine.shortcuts.names:
        engine.shortcuts.run(task, ctx)
    else:
        task.fn(ctx)
