"""The hand-over of results from the caller's thread to the functions that run behind it.

    caller    model 3, hand over 3 ──┐   model 4, hand over 4 ──┐   result 3   body 3
    decode    decode 2               └─> decode 3               └─> decode 4      ^
    write     write 1     write 2                  write 3 ───────────────────────┘

Guarantees
    - A function with one thread runs on the iterations in order. Each function runs once on each.
    - An error of any function on iteration i is raised in place of the result of iteration i, after
      all earlier results (1). Once the error is known, no function begins on iteration i or later.
    - When the loop is left, the functions complete all iterations that were handed over before the
      first error: running functions are awaited (2), the rest runs on the caller's thread (3).
    - A value that was changed between its hand-over and its result is an error (4).

Assumptions
    - No lock is used, because an interrupt of the caller's thread could leave it locked. A thread
      first publishes that it runs and then reads ``_stopped``; ``finish`` first sets ``_stopped``
      and then reads which threads run (5).
    - ``finish`` and ``take`` are called on the caller's thread only, with no other call under way.
    - Functions behind change their own state only, and draw from no default generator. The first
      runs of each function are watched for draws.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from swpipe._values.walk import map_tensors
from swpipe.core.messages import listed
from swpipe.core.plan import PipelinePlan, TaskSchedule
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.device import Device, on_cpu
from swpipe.device.protocol import Event
from swpipe.errors import PlanError, Problem, add_note
from swpipe.inference.operators import OperatorRecorder
from swpipe.loops.batch_memory import Contents

_WATCHED = 4
"""The number of runs of each function that are checked for random draws."""

_LONGEST_S = 600.0
"""The longest time that ``finish`` waits for running functions."""

_PAUSE_S = 50e-6
"""The polling interval of a thread that waits for a copy or a function."""


@dataclass(slots=True)
class Handed:
    """An iteration that was handed over.

    Attributes:
        ctx: The iteration's context.
        value: The value as it was handed over.
        copied: The event after the device's copy of the value to the host; None without a copy.
        done: The number of functions behind that have run.
        thread: The identifier of the thread that is running one of the functions; 0 for none.
        lost: Whether a function has begun and not returned. As in a plain loop, it is not repeated.
    """

    ctx: Any
    value: Contents
    copied: Event | None
    done: int = 0
    thread: int = 0
    lost: bool = False


class HandOver:
    """The iterations of one loop between the caller's thread and their results.

    Attributes:
        failure: The error of the earliest iteration that failed; None without an error.
        handed: The iterations that were handed over and not taken, by number.

    Args:
        caller: The task on the caller's thread that hands over.
        behind: The tasks behind it, in order.
        workers: The number of threads of each task behind.
        lag: How many iterations the results may be behind the caller's thread.
        to_host: Whether tensors are copied to the host.
        device: The loop's device.
        watched: Whether the functions are watched for draws.
    """

    def __init__(
        self,
        caller: PipelineTask,
        behind: Sequence[PipelineTask],
        workers: Sequence[int],
        *,
        lag: int,
        to_host: bool,
        device: Device,
        watched: bool,
    ) -> None:
        own = [_declared(task, threads) for task, threads in zip(behind, workers, strict=True)]
        self.given = (_declared(caller, 1), *own)
        self.handed: dict[int, Handed] = {}
        self._names = [task.name for task in behind]
        self._functions = [task.fn for task in behind]
        self._caller = caller.name
        self._workers = workers
        self._lag = lag
        self._to_host = to_host
        self._device = device
        self._watched = [_WATCHED if watched else 0 for _ in behind]
        self._failures: dict[int, BaseException] = {}
        self._stopped = False

    # ------------------------------------------------------------------------ plan and tasks

    def plan(self, plan: PipelinePlan) -> PipelinePlan:
        """Return a loop's plan in which each task behind has its own thread group and stream."""
        # All tasks behind share one stage. Their order within an iteration comes from `deps`.
        stage = plan.max_stage + self._lag
        schedule = dict(plan.schedule)
        for name, threads in zip(self._names, self._workers, strict=True):
            place = f"behind {name}"[:200]
            schedule[name] = TaskSchedule(stage, place, place, workers=threads)
        deps = plan.deps or [(after, before) for before, after in pairwise(schedule)]
        return replace(plan, schedule=schedule, deps=deps)

    def tasks(
        self, tasks: Sequence[PipelineTask], ahead: Sequence[PipelineTask]
    ) -> tuple[PipelineTask, ...]:
        """Return the tasks, with the hand-over added to all that do not run ahead."""
        return (
            *tasks[: len(ahead)],
            *(
                self._behind(task) if task.name in self._names else self._on_caller(task)
                for task in tasks[len(ahead) :]
            ),
        )

    def _on_caller(self, task: PipelineTask) -> PipelineTask:
        @wraps(task.fn)
        def run(ctx: Any) -> None:
            if self._is_after_failure(ctx.iter_idx):
                return
            try:
                task.fn(ctx)
                if task.name == self._caller:
                    self._hand_over(ctx)
            except Exception as error:  # noqa: BLE001 - raised in place of the result (1)
                self._fail(ctx.iter_idx, task.name, error)

        return replace(task, fn=run)

    def _hand_over(self, ctx: Any) -> None:
        copied = None
        # The event follows the copies on this stream; the functions behind wait for it in _run.
        if self._to_host:
            ctx.batch = map_tensors(ctx.batch, self._on_host)
            copied = self._device.new_event()
            copied.record(self._device.current_stream())
        self.handed[ctx.iter_idx] = Handed(ctx, Contents(ctx.batch), copied)

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in new host memory, without waiting for the device."""
        # Only a copy into pinned memory is asynchronous.
        pinned = self._device.pins_memory and not on_cpu(tensor)
        there = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
        return there.copy_(tensor.detach(), non_blocking=True)

    def _behind(self, task: PipelineTask) -> PipelineTask:
        number = self._names.index(task.name)

        @wraps(task.fn)
        def run(ctx: Any) -> None:
            # `done` differs from `number` if a function before this one was skipped or has failed.
            handed = self.handed.get(ctx.iter_idx)
            if handed is None or handed.done != number or self._is_after_failure(ctx.iter_idx):
                return
            handed.thread = threading.get_ident()  # before it reads _stopped (5)
            try:
                if not self._stopped:
                    self._run(handed)
            finally:
                handed.thread = 0

        return replace(task, fn=run)

    def _run(self, handed: Handed) -> None:
        """Run the next function on an iteration and record its error, if there is one."""
        number = handed.done
        try:
            # Polling lets an interrupt through, which a blocking wait for the event would delay.
            while handed.copied is not None and not handed.copied.query():
                time.sleep(_PAUSE_S)
            handed.copied = None
            handed.lost = True
            if self._watched[number]:
                self._watched[number] -= 1
                self._run_watched(number, handed.ctx)
            else:
                self._functions[number](handed.ctx)
        except Exception as error:  # noqa: BLE001 - raised in place of the result (1)
            self._fail(handed.ctx.iter_idx, self._names[number], error)
        else:
            handed.done += 1
            handed.lost = False

    def _run_watched(self, number: int, ctx: Any) -> None:
        # A draw here would race with draws of the caller's thread from the same generator.
        recorder = OperatorRecorder(self._device)
        with recorder:
            self._functions[number](ctx)
        if 0 in recorder.draws:
            raise _problem(
                self._names[number],
                "draws from torch's default generators beside the caller's thread, so its numbers "
                "depend on who draws before it. Give it a torch.Generator of its own",
            )

    # ------------------------------------------------------------------------------ failures

    def _fail(self, iteration: int, name: str, error: Exception) -> None:
        if isinstance(error, StopIteration):  # the loop would take it for the end of the data
            cause = error
            error = RuntimeError(f"{name!r} raised StopIteration")
            error.__cause__ = cause
        add_note(error, f"swpipe: raised by {name!r}, iteration {iteration}")
        self._failures.setdefault(iteration, error)

    def _is_after_failure(self, iteration: int) -> bool:
        # copy() is atomic under the interpreter lock; other threads may add failures meanwhile.
        return any(failed <= iteration for failed in self._failures.copy())

    @property
    def failure(self) -> BaseException | None:
        """The error of the earliest iteration that has failed, or None."""
        return self._failures[min(self._failures)] if self._failures else None

    # ----------------------------------------------------------------------------- the caller

    def begin(self) -> None:
        """Reset the state before a pass begins or continues."""
        self._failures.clear()
        self._stopped = False
        self.handed.clear()

    def take(self, iteration: int) -> None:
        """Take an iteration; raise its error, if it has one, in place of its result.

        Raises:
            PlanError: The value that was handed over has been changed since.
            Exception: What a function has raised.
        """
        handed = self.handed.pop(iteration, None)
        failure = self._failures.get(iteration)
        if failure is not None:
            raise failure
        # A function behind may have seen the old or the new value, so the result is not defined.
        if handed is not None and handed.value.written():  # (4)
            names = listed([repr(name) for name in self._names])
            error = _problem(
                self._caller,
                f"handed over a value of iteration {iteration} that was changed before {names} "
                "had run, by the next iterations on the caller's thread or by a function behind. "
                "Hand over a copy (on_caller(function, to_host=True)), and let functions behind "
                "make new values",
            )
            self._failures[iteration] = error
            raise error

    def finish(self) -> None:
        """Complete the iterations that were handed over, and drop their results.

        Raises:
            RuntimeError: A function has not returned.
        """
        count = len(self._functions)
        try:
            self._stopped = True  # before it reads which threads run (5)
            deadline = time.monotonic() + _LONGEST_S
            while not self._is_idle():  # (2)
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"a function behind the loop has not returned for {_LONGEST_S:.0f} s"
                    )
                time.sleep(_PAUSE_S)
            for number, handed in sorted(self.handed.items()):
                while handed.done < count and not (handed.lost or self._is_after_failure(number)):
                    self._run(handed)  # (3)
        finally:
            missed = sorted(number for number, h in self.handed.items() if h.done < count)
            self.handed = {}
            if missed and self.failure is not None:
                text = f"swpipe: functions behind did not run on iterations {missed}"
                add_note(self.failure, text)

    def _is_idle(self) -> bool:
        own = threading.get_ident()  # an interrupt may have ended a function on this thread
        return all(handed.thread in (0, own) for handed in self.handed.copy().values())


def _declared(task: PipelineTask, threads: int) -> PipelineTask:
    """Return a task with a private state, or with no state if it has several threads."""
    own = DeclaredIO(state=f"what {task.name} keeps"[:200], others="", on_host=True)
    return task if threads > 1 else replace(task, pure=False, io=(own,))


def _problem(name: str, text: str) -> PlanError:
    return PlanError([Problem(f"{name!r} {text}", (name,))])
