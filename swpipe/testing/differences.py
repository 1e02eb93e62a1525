"""A search for the first task, iteration, attribute and element in which two runs differ.

Both sides run to the end and copy the values that each task writes::

    a   loader ─ <pull> 0 ─ decode 0 ─ forward 0 ─ step 0 ─ <retire> 0 ─ <pull> 1 ─ ...
    b   loader ─ <pull> 0 ─ decode 0 ─ forward 0 ─ step 0 ─ <retire> 0 ─ <pull> 1 ─ ...
                                           │
                     compared in the serial order, iteration by iteration

Values are copied on the task's thread and stream, directly after the task, and compared at the end,
so that the copies add no waits. If the loop has a ``state``, tasks that are not pure run one at a
time, with the device idle after each of them. Each change of the state then belongs to one task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from swpipe._values.context_log import ContextWatch
from swpipe._values.generators import default_generators, set_default_generators
from swpipe.core.messages import shown
from swpipe.core.plan import PULL
from swpipe.core.task import PipelineTask
from swpipe.device import Device, resolve
from swpipe.program import RETIRE
from swpipe.testing.compared_values import DELETED, copies, first_unequal, leaves_by_name
from swpipe.testing.same_numbers import Loop, pipeline_of, tasks_of


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two runs.

    Attributes:
        iteration: The number of the iteration, from 0.
        task: The task that left it; ``<pull>`` for a batch, and ``<retire>`` for the body of the
            loop, or where the caller does not see what the tasks left.
        attribute: Its path, ``ctx.x['ids']``, or ``state()[0]['weight']`` for changed state.
        element: Indices from 0 into a tensor; () for the value as a whole.
        a: The value of the first side; it prints as "nothing" if it has none.
        b: The value of the second.
    """

    iteration: int
    task: str
    attribute: str
    element: tuple[int, ...]
    a: Any
    b: Any

    def __str__(self) -> str:
        return (
            f"iteration {self.iteration}, task {self.task!r}: {self.attribute}"
            f"{[*self.element] or ''} is {shown(self.a)} in a, and {shown(self.b)} in b"
        )


def first_difference(
    a: Callable[[], Loop],
    b: Callable[[], Loop],
    *,
    iterations: int = 50,
    device: Device | torch.device | str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Difference | None:
    """Run two loops and return the first difference between the values that their tasks write.

    For two implementations of some tasks, or for one under two plans::

        assert first_difference(make_loop, lambda: replace(make_loop(), plan=mine)) is None

    Tasks with the same name are compared, in the order of ``a``, and what both sides hand to the
    body of the loop. Both sides begin with the same states of the default random generators. All
    that tasks leave is kept: use few iterations. Effects are not checked: the difference is what
    shows them.

    Args:
        a: Makes the first loop with all that it changes, as for ``assert_same_numbers``.
        b: Makes the second.
        iterations: How many to run at most.
        device: See ``SWPipeline``.
        rtol: Floating-point numbers are the same up to this share, as in ``torch.isclose``; 0 for
            all bits.
        atol: Or up to this.

    Returns:
        None if there is no difference.

    Raises:
        BaseException: What a task raises, with a note of where.
    """
    where = resolve(device)
    begin = default_generators(where)
    side_a = _Side(a(), where, iterations)
    set_default_generators(where, begin)
    side_b = _Side(b(), where, iterations)
    # The copies compared below are complete, because each side has synchronized the device.
    tasks = [name for name in side_a.tasks if name in side_b.tasks]
    # If one side has pulled more batches, its <pull> leaves what the other side's does not.
    for number in range(max(side_a.pulled, side_b.pulled)):
        for task in (PULL, *tasks, RETIRE):
            left, right = (side.left.get((number, task), {}) for side in (side_a, side_b))
            if task == RETIRE:  # tasks that only one side has may leave more
                left = _of_both(left, right)
                right = _of_both(right, left)
            if unequal := first_unequal(left, right, rtol, atol):
                return Difference(number, task, *unequal)
    return None


def _of_both(values: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that the other side has as well, and all of the loop's state."""
    return {k: value for k, value in values.items() if k in other or k.startswith("state()")}


class _Side:
    """The complete run of one of the two loops.

    Attributes:
        tasks: The names of the tasks, in serial order.
        pulled: The number of batches.
        left: A mapping from (iteration, task) to the leaves that the task wrote, by name.
    """

    def __init__(self, loop: Loop, device: Device, iterations: int) -> None:
        self.left: dict[tuple[int, str], dict[str, Any]] = {}
        self.pulled = 0
        self._device = device
        # Tasks that change the state hold this lock, so that each change has one author.
        self._turn = threading.Lock()
        # `list` is the default of Loop.state and stands for a loop without one.
        self._state = None if loop.state is list else loop.state
        self._last = copies(self._now())
        tasks = [self._recorded(each) for each in tasks_of(loop)]
        # A check of effects would raise before the difference is found.
        with pipeline_of(loop, tasks, device) as pipe:
            self.tasks = [each.name for each in pipe.tasks]
            for ctx in pipe.iterate(self._batches(loop, iterations)):
                left = copies(_attributes(ctx, [*vars(ctx)]))
                with self._changes(left):
                    loop.body(ctx)
                self.left[ctx.iter_idx, RETIRE] = left
            device.synchronize()

    def _batches(self, loop: Loop, iterations: int) -> Iterator[Any]:
        """Yield the loader's batches, of which copies are kept."""
        for batch in islice(loop.loader, iterations):
            self.left[self.pulled, PULL] = copies(leaves_by_name({"ctx.batch": batch}))
            self.pulled += 1
            yield batch

    def _recorded(self, task: PipelineTask) -> PipelineTask:
        """Return the task with a function that copies what it leaves."""

        def run(ctx: Any) -> None:
            left: dict[str, Any] = {}
            # A pure task changes its context only, so that it may overlap with the others.
            with nullcontext() if task.pure else self._changes(left):
                with ContextWatch(ctx) as watch:
                    task.fn(ctx)
                left |= copies(_attributes(ctx, watch.produced))
                left |= {f"ctx.{name}": DELETED for name in watch.deleted}
            self.left[ctx.iter_idx, task.name] = left

        return replace(task, fn=run)

    def _now(self) -> dict[str, Any]:
        """Return the leaves of the loop's state, by name."""
        return {} if self._state is None else leaves_by_name({"state()": self._state()})

    @contextmanager
    def _changes(self, into: dict[str, Any]) -> Iterator[None]:
        """Add the changes of the state in this block to ``into``; one block runs at a time."""
        if self._state is None:
            yield
            return
        with self._turn:
            yield
            self._device.synchronize()
            now = self._now()
            # Only changed leaves are copied: a task seldom changes the whole state.
            for name in {**self._last, **now}:
                leaf = now.get(name, DELETED)
                if first_unequal({name: self._last.get(name, DELETED)}, {name: leaf}):
                    into |= copies({name: leaf})
                    self._last[name] = into[name]


def _attributes(ctx: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the leaves of a context's attributes, by name."""
    # A task on another thread may delete an attribute at any time.
    values = dict(vars(ctx))
    return leaves_by_name({f"ctx.{name}": values[name] for name in names if name in values})
