"""The functions of tasks that run ahead of the loop's body, as a plain loop's body would find them.

    io thread    decode 2    decode 3 fails    decode 4
    caller                   body 1            body 2      forward 3: raises what decode 3 raised

An exception of a task, but for KeyboardInterrupt, is raised when the iterations before are
complete, by the first task on the caller's thread. This one also looks whether the batch is as the
tasks ahead have left it: a batch that the loader gives twice, say, may be modified for its first
iteration when a task has already read it for the second.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from swpipe._engine.randomness import putting_off
from swpipe._engine.waiting import Cancelled
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask
from swpipe.device import BatchCopy
from swpipe.errors import PlanError, Problem, add_note
from swpipe.loops.batch_memory import Content, content_of, memory_parts

HAND_OVER = PipelineTask("hand over", lambda ctx: None, reads=())
"""On the caller's thread, where all other tasks run ahead."""


def _content(buffer: weakref.ref[Any]) -> Content | None:
    found = buffer()
    return None if found is None else content_of(found)


class AheadTasks:
    """Tasks of which the first run ahead of the others.

    Attributes:
        tasks: All tasks, with functions that do this.
        begin: Called before the first task on the caller's thread, in each iteration.

    Args:
        tasks: All tasks, in serial order.
        ahead: How many of them run ahead; not all.
        pulled_ahead: Whether batches are pulled ahead.
    """

    def __init__(self, tasks: Sequence[PipelineTask], ahead: int, *, pulled_ahead: bool) -> None:
        self.begin: Callable[[], None] = lambda: None
        self._failures: dict[int, BaseException] = {}
        self._buffers: dict[int, list[weakref.ref[Any]]] = {}  # of batches, by iteration
        self._contents: dict[int, list[Content | None]] = {}  # as the last task ahead left them
        self._names = [task.name for task in tasks[:ahead]]
        self._mends = [
            "device=" if isinstance(task.fn, BatchCopy) else f"pure=True of {task.name!r}"
            for task in tasks[:ahead]
        ]
        self.tasks = tuple(
            self._ahead(task) if number < ahead else self._behind(task) if number == ahead else task
            for number, task in enumerate(tasks)
        )
        if not pulled_ahead:
            self.tasks = tuple(tasks)

    def _ahead(self, task: PipelineTask) -> PipelineTask:
        first, last = task.name == self._names[0], task.name == self._names[-1]

        @wraps(task.fn)
        def run(ctx: Any) -> None:
            number = ctx.iter_idx
            if first:
                self._buffers[number] = [weakref.ref(one) for one in memory_parts(ctx.batch)[0]]
            try:
                if number not in self._failures:
                    task.fn(ctx)
            except (KeyboardInterrupt, Cancelled):
                raise
            except BaseException as error:  # noqa: BLE001 - raised by the first task behind
                add_note(error, f"swpipe: raised by task {task.name!r}, iteration {number}")
                self._failures[number] = error
            if last and number in self._buffers:  # not where a shortcut replays the first
                self._contents[number] = [*map(_content, self._buffers[number])]

        return replace(task, fn=run)

    def _behind(self, task: PipelineTask) -> PipelineTask:
        @wraps(task.fn)
        def run(ctx: Any) -> None:
            number = ctx.iter_idx
            if task.random:
                with putting_off():
                    self.begin()
            else:
                self.begin()
            if (failure := self._failures.pop(number, None)) is not None:
                raise failure
            then, buffers = self._contents.pop(number, ()), self._buffers.pop(number, ())
            if then:
                now = map(_content, buffers)
                # One that is gone nobody else has.
                if any(one not in (was, None) for one, was in zip(now, then, strict=True)):
                    raise self._modified(number)
            task.fn(ctx)

        return replace(task, fn=run)

    def _modified(self, number: int) -> PlanError:
        names = listed([repr(name) for name in self._names])
        text = (
            f"the batch of iteration {number} was modified in place, by the loop's body or a task "
            f"of another iteration, after {names} had run on it ahead: a pure task uses what "
            "nobody else changes while the loop runs. Let the loader give each batch memory of its "
            f"own, or leave out {listed(self._mends)}"
        )
        return PlanError([Problem(text, tuple(self._names))])

    def drop(self) -> None:
        """The iterations in flight are dropped."""
        self._failures.clear()
        self._buffers.clear()
        self._contents.clear()
