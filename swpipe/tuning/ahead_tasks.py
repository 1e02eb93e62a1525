"""The functions of tasks that run ahead of the loop's body, as a plain loop's body would find them.

    io thread    decode 2    decode 3 fails    decode 4
    caller                   body 1            body 2      forward 3: raises what decode 3 raised

An exception of a task is raised when the iterations before are complete, by the first task on the
caller's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from swpipe.core.errors import add_note
from swpipe.core.task import PipelineTask


class AheadTasks:
    """Tasks of which the first run ahead of the others.

    Attributes:
        tasks: All tasks, with functions that do this.

    Args:
        tasks: All tasks, in serial order.
        names: Those that run ahead.
    """

    def __init__(self, tasks: Sequence[PipelineTask], names: Sequence[str]) -> None:
        self._failures: dict[int, Exception] = {}
        behind = [task.name for task in tasks if task.name not in names]
        self._raises = behind[0] if names else ""
        self.tasks = tuple(
            self._ahead(task) if task.name in names else self._behind(task) for task in tasks
        )

    def _ahead(self, task: PipelineTask) -> PipelineTask:
        @wraps(task.fn)
        def run(ctx: Any) -> None:
            try:
                if ctx.iter_idx not in self._failures:
                    task.fn(ctx)
            except Exception as error:  # noqa: BLE001 - raised by the first task behind
                add_note(error, f"swpipe: raised by task {task.name!r}, iteration {ctx.iter_idx}")
                self._failures[ctx.iter_idx] = error

        return replace(task, fn=run)

    def _behind(self, task: PipelineTask) -> PipelineTask:
        if task.name != self._raises:
            return task

        @wraps(task.fn)
        def run(ctx: Any) -> None:
            if (failure := self._failures.pop(ctx.iter_idx, None)) is not None:
                raise failure
            task.fn(ctx)

        return replace(task, fn=run)

    def drop(self) -> None:
        """The iterations in flight are dropped."""
        self._failures.clear()
