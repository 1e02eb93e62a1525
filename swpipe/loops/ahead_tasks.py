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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swpipe._engine.waiting import Cancelled
from swpipe._values.context_log import attributes
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask
from swpipe.device import BatchCopy
from swpipe.errors import PlanError, Problem, add_note
from swpipe.loops.batch_memory import Parts
from swpipe.loops.batches_ahead import BatchAsPulled

HAND_OVER = PipelineTask("hand over", lambda ctx: None, reads=())
"""The task on the caller's thread, if all tasks of the loop run ahead."""

_TWICE = 4
"""The number of iterations that run twice, if there are several workers."""

_WHOLE = 1 << 40
"""A number of bytes above the size of any batch: the checksum covers all of it."""


class _Left(NamedTuple):
    """An iteration as the tasks ahead have left it: its batch, and the values of its context."""

    number: int
    given: BatchAsPulled
    returned: BatchAsPulled
    names: list[str]


class AheadTasks:
    """Tasks of which the first ones run ahead of the rest.

    Attributes:
        tasks: All tasks, with functions that add these checks.
        begin: A function of batch and iteration, called before the first task of each iteration.
        drawn: The names of the tasks ahead that draw from generators of their own, by the
            generator's id.

    Args:
        tasks: All tasks, in serial order.
        ahead: The number of tasks that run ahead; at least one task does not.
        pulled_ahead: Whether batches are pulled ahead.
        workers: The number of threads for the tasks ahead.
    """

    def __init__(
        self, tasks: Sequence[PipelineTask], ahead: int, *, pulled_ahead: bool, workers: int
    ) -> None:
        self.begin: Callable[[Any, int], None] = lambda batch, iteration: None
        self.drawn: dict[int, str] = {}
        # Threads share the dictionaries below without a lock. Their keys are iterations, unless
        # noted: an entry has one writer at a time, and CPython's dict operations are atomic.
        self._failures: dict[int, BaseException] = {}
        self._given: dict[int, BatchAsPulled] = {}  # the batch as its first task found it
        self._left: dict[int, _Left] = {}  # finished ahead, and not yet handed over
        # The iterations that were in use when an iteration began.
        self._in_use: dict[int, dict[int, _Left]] = {}
        self._of_body: _Left | None = None  # the iteration that the body has
        self._states: dict[int, dict[int, Tensor]] = {}  # of generators, after each iteration
        self._generators: dict[int, torch.Generator] = {}  # by id
        self._after: dict[int, Tensor] = {}  # the states after the iteration handed over last
        self._twice = _TWICE if workers > 1 else 0  # how many iterations are still to be copied
        self._copies: dict[int, Any] = {}  # contexts before their first task
        self._again: list[tuple[Any, Parts]] = []  # these contexts, and the results of the tasks
        self._functions = [task.fn for task in tasks[:ahead]]
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
        first = task.name == self._names[0]
        last = task.name == self._names[-1]

        @wraps(task.fn)
        def run(ctx: Any) -> None:
            number = ctx.iter_idx
            if first:
                self._check_batch(ctx)
                self._given[number] = _contents(ctx.batch)
                self._in_use[number] = self._used_now()
                if self._twice:
                    self._copies[number] = _copied(ctx)
            try:
                # An iteration that has failed keeps its place, but runs no further task.
                if number not in self._failures:
                    task.fn(ctx)
            except (KeyboardInterrupt, Cancelled):
                raise
            except BaseException as error:  # noqa: BLE001 - raised by the first task behind
                add_note(error, f"swpipe: raised by task {task.name!r}, iteration {number}")
                self._failures[number] = error
            for name, generator in self._generators.copy().items():
                self._states.setdefault(number, {})[name] = generator.get_state()
            if last and number in self._given:  # not where a shortcut replays the first
                self._note_left(ctx)

        def draws_from(generator: torch.Generator, number: int) -> None:
            """Note a generator of the task's own, seen in an iteration that has just run."""
            name = id(generator)
            self.drawn[name] = task.name
            self._generators[name] = generator
            self._states.setdefault(number, {})[name] = generator.get_state()

        if getattr(task.fn, "may_draw", False):
            run.draws_from = draws_from  # type: ignore[attr-defined]
        return replace(task, fn=run)

    def _note_left(self, ctx: Any) -> None:
        """Note the values that the tasks ahead have left of an iteration, and check their memory.

        If they are in memory of an iteration that is in use, the iteration fails.
        """
        number = ctx.iter_idx
        names = [*attributes(ctx)]
        values = [*attributes(ctx).values()]
        left = _Left(number, self._given.pop(number), _contents(values), names)
        left.given.renew()
        # The body may have moved on since the first of these tasks began: what either time shows
        # in use is checked.
        in_use = self._in_use.pop(number) | self._used_now()
        for earlier in in_use.values():
            if earlier.returned.is_used_again_by(left.returned):
                again = not earlier.given.written()
                error = self._used_again(number) if again else self._modified(number)
                self._failures.setdefault(number, error)
        self._left[number] = left
        given = self._copies.pop(number, None)
        if given is not None and number not in self._failures:
            self._twice -= 1
            self._again.append((given, Parts.of(values, _WHOLE)))

    def end_body(self) -> None:
        """Note that the body has ended, and with it the use of its values."""
        self._of_body = None

    def _used_now(self) -> dict[int, _Left]:
        """Return the iterations whose values the body or later tasks use, by number."""
        of_body = self._of_body
        return self._left.copy() if of_body is None else {of_body.number: of_body, **self._left}

    def _behind(self, task: PipelineTask) -> PipelineTask:
        @wraps(task.fn)
        def run(ctx: Any) -> None:
            number = ctx.iter_idx
            if not self._names:
                self._check_batch(ctx)
            if (failure := self._failures.pop(number, None)) is not None:
                raise failure
            self._check_left(ctx)
            if len(self._again) >= _TWICE:
                self.run_again()
            task.fn(ctx)

        return replace(task, fn=run)

    def _check_batch(self, ctx: Any) -> None:
        """Let an iteration fail whose batch is not as it was pulled."""
        try:
            self.begin(ctx.batch, ctx.iter_idx)
        except RuntimeError as error:
            self._failures[ctx.iter_idx] = error

    def _check_left(self, ctx: Any) -> None:
        """Raise an error if values are not as the tasks ahead have left them.

        Raises:
            PlanError: The batch was modified, or memory of an earlier batch was used again.
        """
        number = ctx.iter_idx
        self._after = self._states.pop(number, {})
        self._of_body = left = self._left.pop(number, None)
        if left is not None and left.given.written():
            raise self._modified(number)
        if left is None:
            return
        # With an attribute deleted, since no later task uses it, the values cannot be compared.
        values = attributes(ctx) if [*attributes(ctx)] == left.names else None
        refilled = values is not None and left.returned.is_refilled([*values.values()])
        if refilled or left.returned.written():
            raise self._used_again(number)

    def run_again(self) -> None:
        """Run the tasks once more on the first iterations, if there are several workers.

        Raises:
            PlanError: The tasks leave other values than the first time.
        """
        again = self._again
        self._again = []
        self._twice = 0
        # Workers complete iterations in any order: sort them to name the first one that differs.
        for ctx, left in sorted(again, key=lambda run: run[0].iter_idx):
            try:
                for function in self._functions:
                    function(ctx)
            except Exception:  # noqa: BLE001
                # It may fail now for a reason of its own (a file that has gone), and the plain
                # loop does not call it here: there is nothing to compare.
                continue
            if Parts.of([*attributes(ctx).values()], _WHOLE) != left:
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
        return listed([repr(name) for name in self._names])

    def _modified(self, number: int) -> PlanError:
        return self._problem(
            f"the batch of iteration {number} was modified in place, by the loop's body or a task "
            f"of another iteration, after {self._listed} had run on it ahead: a pure task uses "
            "what nobody else changes while the loop runs. Let the loader give each batch memory "
            f"of its own, or leave out {listed(self._mends)}"
        )

    def _used_again(self, number: int) -> PlanError:
        return self._problem(
            f"{self._listed} ran ahead and left memory of an earlier batch for iteration {number}, "
            "or wrote what it had left, while the loop had not done with it: it returns a buffer "
            "that it fills again. Let it make a new tensor or array for each batch"
        )

    def _problem(self, text: str) -> PlanError:
        return PlanError([Problem(text, tuple(self._names))])

    def drop(self) -> None:
        """Forget the iterations in flight, and set the tasks' generators back to before them."""
        for name, state in self._after.items():
            self._generators[name].set_state(state)
        by_iteration = self._failures, self._given, self._left, self._in_use, self._states
        for kept in (*by_iteration, self._copies):
            kept.clear()
        self._of_body = None


def _contents(value: Any) -> BatchAsPulled:
    return BatchAsPulled(value, keep=False)


def _copied(ctx: Any) -> Any:
    """Return a context with copies of its values; None if a value cannot be copied."""
    with suppress(Exception):
        copied = copy.copy(ctx)
        vars(copied).update(copy.deepcopy(attributes(ctx)))
        return copied
    return None
