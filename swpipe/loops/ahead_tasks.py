"""The tasks that run ahead of the loop's body, with the errors and values of a plain loop.

    io thread    decode 2    decode 3 fails    decode 4
    caller                   body 1            body 2      forward 3: raises what decode 3 raised

An exception of a task, except for KeyboardInterrupt, is raised when the earlier iterations are
complete, by the first task on the caller's thread. This first task also checks that values are
still as the tasks ahead have left them. They may not be: if the loader gives a batch twice, its
first iteration may modify it after a task has already read it for the second one. Or a task may
return the same buffer for each batch.

If several workers run the tasks on several batches at once, the tasks run a second time on a loop's
first 4 iterations, on copies of the inputs. A task that keeps values from batch to batch, or that
is not safe on several threads, leaves other results.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from swpipe._engine.waiting import Cancelled
from swpipe._values.context_log import attributes
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask
from swpipe.device import BatchCopy
from swpipe.errors import PlanError, Problem, add_note
from swpipe.loops.batch_memory import Buffer, Contents, are_written, parts_of

HAND_OVER = PipelineTask("hand over", lambda ctx: None, reads=())
"""The task on the caller's thread, if all tasks of the loop run ahead."""

_TWICE = 4
"""The number of iterations that run twice, if there are several workers."""

_WHOLE = 1 << 40
"""A number of places above the size of any batch: the checksum covers all of it."""


@dataclass(slots=True)
class _Iteration:
    """An iteration that tasks ahead work on, or have left for the body, until the body has ended.

    Attributes:
        batch: The tensors and arrays of the batch as its first task found it; none if a shortcut
            replays that task.
        in_use: The iterations that were in use when this one began.
        copied: The context before its first task, to run the tasks on again; None if they are not.
        failure: What a task has raised, for the first task behind.
        given: These tensors and arrays, with their contents after the last task.
        names: The names of the attributes that the tasks have left.
        returned: The contents of these attributes; None until the last task has run.
        states: The states of the tasks' own generators after the iteration, by the generator's id.
    """

    batch: Sequence[weakref.ref[Any]] = ()
    in_use: Sequence[_Iteration] = ()
    copied: Any = None
    failure: BaseException | None = None
    given: Sequence[Buffer] = ()
    names: Sequence[str] = ()
    returned: Contents | None = None
    states: dict[int, Tensor] = field(default_factory=dict)


class AheadTasks:
    """Tasks of which the first ones run ahead of the rest.

    Attributes:
        tasks: All tasks, with functions that add these checks.
        drawn: The tasks ahead that draw from a generator of their own: the name of the task and the
            generator, by the generator's id.

    Args:
        tasks: All tasks, in serial order.
        ahead: The number of tasks that run ahead; at least one task does not.
        pulled_ahead: Whether batches are pulled ahead.
        workers: The number of threads for the tasks ahead.
    """

    def __init__(
        self, tasks: Sequence[PipelineTask], ahead: int, *, pulled_ahead: bool, workers: int
    ) -> None:
        self._check: Callable[[Any, int], None] = lambda batch, iteration: None
        self.drawn: dict[int, tuple[str, torch.Generator]] = {}
        # Threads share this dictionary without a lock: an entry has one writer at a time, and
        # CPython's operations of dictionaries are atomic.
        self._iterations: dict[int, _Iteration] = {}
        self._body = -1  # the number of the iteration that the body has
        # The states of these generators after the iteration that was handed over last.
        self._after: dict[int, Tensor] = {}
        self._workers = workers
        self._twice = range(0)  # the numbers of the iterations that run twice
        # The copied contexts, and what the tasks have left of them the first time.
        self._again: list[tuple[Any, int]] = []
        self._ahead = tuple(tasks[:ahead])
        self.tasks = tuple(tasks)
        if pulled_ahead:
            leading = map(self._before, self._ahead)
            self.tasks = (*leading, self._behind(tasks[ahead]), *tasks[ahead + 1 :])

    def begin(self, check: Callable[[Any, int], None], first: int) -> None:
        """Begin a pass.

        Args:
            check: A function of batch and iteration, called before an iteration's first task.
            first: The number of the next iteration.
        """
        self._check = check
        if self._workers > 1 and not self._twice:
            self._twice = range(first, first + _TWICE)

    def _before(self, task: PipelineTask) -> PipelineTask:
        """Return a task that runs ahead, with its checks."""
        first = task is self._ahead[0]
        last = task is self._ahead[-1]

        @wraps(task.fn)
        def run(ctx: Any) -> None:
            number = ctx.iter_idx
            iteration = self._iterations.setdefault(number, _Iteration())
            try:
                if first:
                    self._check(ctx.batch, number)
                    iteration.batch = [*map(weakref.ref, parts_of(ctx.batch)[0])]
                    iteration.in_use = self._used_now()
                    if number in self._twice:
                        iteration.copied = _copied(ctx)
                # An iteration that has failed keeps its place, but runs no further task.
                if iteration.failure is None:
                    task.fn(ctx)
            except (KeyboardInterrupt, Cancelled):
                raise
            except BaseException as error:  # noqa: BLE001 - raised by the first task behind
                add_note(error, f"swpipe: raised by task {task.name!r}, iteration {number}")
                iteration.failure = error
            for key, (_, generator) in self.drawn.copy().items():
                iteration.states[key] = generator.get_state()
            if last:
                self._note_left(ctx, iteration)

        def draws_from(generator: torch.Generator, number: int) -> None:
            """Note a generator of the task's own, seen in an iteration that has just run."""
            self.drawn[id(generator)] = task.name, generator
            iteration = self._iterations.setdefault(number, _Iteration())
            iteration.states[id(generator)] = generator.get_state()

        if getattr(task.fn, "may_draw", False):
            run.draws_from = draws_from  # type: ignore[attr-defined]
        return replace(task, fn=run)

    def _note_left(self, ctx: Any, iteration: _Iteration) -> None:
        """Note the values that the tasks ahead have left of an iteration, and check their memory.

        If they are in memory of an iteration that is in use, the iteration fails.
        """
        values = attributes(ctx)
        iteration.names = [*values]
        returned = Contents([*values.values()])
        iteration.given = [
            Buffer.of(part) for ref in iteration.batch if (part := ref()) is not None
        ]
        # The body may have moved on since the first of these tasks began: what either time shows
        # in use is checked.
        for earlier in (*iteration.in_use, *self._used_now()):
            if earlier.returned is not None and earlier.returned.is_used_again_by(returned):
                modified = are_written(earlier.given)
                error = self._modified(ctx) if modified else self._used_again(ctx)
                iteration.failure = iteration.failure or error
        iteration.in_use = ()
        iteration.returned = returned
        if iteration.copied is not None and iteration.failure is None:
            checksum = Contents([*values.values()], _WHOLE).checksum
            self._again.append((iteration.copied, checksum))
        iteration.copied = None

    def end_body(self) -> None:
        """Note that the body has ended, and with it the use of its values."""
        self._iterations.pop(self._body, None)

    def _used_now(self) -> list[_Iteration]:
        """Return the iterations whose values the body or later tasks use."""
        iterations = self._iterations.copy().values()
        return [iteration for iteration in iterations if iteration.returned is not None]

    def _behind(self, task: PipelineTask) -> PipelineTask:
        """Return the first task that does not run ahead, with its checks."""

        @wraps(task.fn)
        def run(ctx: Any) -> None:
            if self._ahead:
                self._hand_over(ctx)
            else:
                self._check(ctx.batch, ctx.iter_idx)
            task.fn(ctx)

        return replace(task, fn=run)

    def _hand_over(self, ctx: Any) -> None:
        """Give the body an iteration, if it is as the tasks ahead have left it.

        Raises:
            PlanError: The batch was modified, or memory of an earlier batch was used again.
            BaseException: What a task ahead has raised.
        """
        # A shortcut may replay all tasks ahead.
        iteration = self._iterations.get(ctx.iter_idx) or _Iteration()
        if iteration.failure is not None:
            raise iteration.failure
        self._body = ctx.iter_idx
        self._after = iteration.states
        returned = iteration.returned
        if returned is None:
            return
        if are_written(iteration.given):
            raise self._modified(ctx)
        # With an attribute deleted, since no later task uses it, the containers cannot be compared.
        values = attributes(ctx)
        refilled = [*values] == iteration.names and not returned.are_those_of([*values.values()])
        if refilled or returned.written():
            raise self._used_again(ctx)
        if len(self._again) >= _TWICE:
            self.run_again()

    def run_again(self) -> None:
        """Run the tasks once more on the first iterations, if there are several workers.

        Raises:
            PlanError: The tasks leave other values than the first time.
        """
        again = self._again
        self._again = []
        # Workers complete iterations in any order: sort them to name the first one that differs.
        for ctx, checksum in sorted(again, key=lambda run: run[0].iter_idx):
            try:
                for task in self._ahead:
                    task.fn(ctx)
            except Exception:  # noqa: BLE001
                # It may fail now for a reason of its own (a file that has gone), and the plain
                # loop does not call it here: there is nothing to compare.
                continue
            if Contents([*attributes(ctx).values()], _WHOLE).checksum != checksum:
                raise self._problem(
                    f"{self._listed} left something else of iteration {ctx.iter_idx} when run on "
                    "the same batch again, after those of other iterations: it keeps something "
                    "from batch to batch (a counter, a mean, a generator), or is not safe on "
                    "several threads at once (a buffer of its own, a flag that it sets and "
                    "resets). Let it keep nothing and make what it needs anew, or give it one "
                    "thread (workers=1)"
                )

    @property
    def _listed(self) -> str:
        return listed([repr(task.name) for task in self._ahead])

    def _modified(self, ctx: Any) -> PlanError:
        mends = [
            "device=" if isinstance(task.fn, BatchCopy) else f"pure=True of {task.name!r}"
            for task in self._ahead
        ]
        return self._problem(
            f"the batch of iteration {ctx.iter_idx} was modified in place, by the loop's body or a "
            f"task of another iteration, after {self._listed} had run on it ahead: a pure task "
            "uses what nobody else changes while the loop runs. Let the loader give each batch "
            f"memory of its own, or leave out {listed(mends)}"
        )

    def _used_again(self, ctx: Any) -> PlanError:
        return self._problem(
            f"{self._listed} ran ahead and left memory of an earlier batch for iteration "
            f"{ctx.iter_idx}, or wrote what it had left, while the loop had not done with it: it "
            "returns a buffer that it fills again. Let it make a new tensor or array for each batch"
        )

    def _problem(self, text: str) -> PlanError:
        return PlanError([Problem(text, tuple(task.name for task in self._ahead))])

    def drop(self) -> None:
        """Forget the iterations in flight, and set the tasks' generators back to before them."""
        for key, state in self._after.items():
            _, generator = self.drawn[key]
            generator.set_state(state)
        self._iterations.clear()


def _copied(ctx: Any) -> Any:
    """Return a context with copies of its values; None if a value cannot be copied."""
    with suppress(Exception):
        copied = copy.copy(ctx)
        vars(copied).update(copy.deepcopy(attributes(ctx)))
        return copied
    return None
