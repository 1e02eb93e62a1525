"""Under every plan: the serial run's numbers, each batch once and in order, no more in flight.

Random task graphs, plans, depths, thread groups, streams and ends of data, with random pauses
inside the tasks. What is drawn is the same in every run of these tests.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given

from swpipe import IterContext, PipelineTask, SWPipeline
from swpipe.core.task import TaskFn
from tests.support.budget import examples
from tests.support.machines import TorchMachine, outputs, random_pauses, tasks_of
from tests.support.strategies import Case, cases

pytestmark = pytest.mark.slow

EXAMPLES = 120
"""The number of random plans; the virtual device draws its own (``tests/device``)."""

SEED = 11
"""The seed of tasks with random numbers."""


class Caller:
    """The user of a pipeline: yields batches, takes contexts, and checks what is in flight.

    Attributes:
        found: The outputs of each iteration, in the order in which they were handed out.
    """

    def __init__(self, case: Case) -> None:
        self.found: list[dict[str, Any]] = []
        self._depth = case.plan.depth
        self._left = iter(case.batches)
        self._pulled = 0
        self._contexts: dict[int, weakref.ref[IterContext]] = {}
        self._values: list[weakref.ref[torch.Tensor]] = []

    def watch(self, tasks: Iterable[PipelineTask]) -> list[PipelineTask]:
        """Return the same tasks with functions that record their contexts."""
        return [replace(task, fn=partial(self._run, task.fn)) for task in tasks]

    def _run(self, fn: TaskFn, ctx: IterContext) -> None:
        self._contexts[ctx.iter_idx] = weakref.ref(ctx)
        fn(ctx)

    def batches(self) -> Iterator[int | None]:
        """Yield the remaining batches; at each pull, less than ``depth`` are in flight."""
        for batch in self._left:
            self._pulled += 1
            assert self._pulled - len(self.found) <= self._depth
            assert sum(ref() is not None for ref in self._contexts.values()) < self._depth
            yield batch

    def take(self, ctx: IterContext) -> None:
        """Copy an iteration's outputs, and check that iterations come in order."""
        assert ctx.iter_idx == len(self.found)
        values = {**outputs(ctx), "iter_idx": ctx.iter_idx}
        self.found.append({name: copied(value) for name, value in values.items()})
        self._values += [weakref.ref(v) for v in values.values() if isinstance(v, torch.Tensor)]

    def take_all(self, contexts: list[IterContext]) -> None:
        """Take the contexts that ``drain`` returned."""
        for ctx in contexts:
            self.take(ctx)

    def nothing_is_held(self) -> bool:
        """Return whether all returned contexts and their values are freed."""
        contexts = [self._contexts[i]() for i in range(len(self.found)) if i in self._contexts]
        return not any(x is not None for x in [*contexts, *(ref() for ref in self._values)])


def copied(value: Any) -> Any:
    """Return a clone of a tensor; any other value itself."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def run_pipelined(case: Case, **options: Any) -> tuple[list[dict[str, Any]], TorchMachine]:
    """Return the outputs, and the machine with its final parameters, under the plan."""
    machine, caller = TorchMachine(case.workload, random_pauses(case.seed)), Caller(case)
    tasks = caller.watch(tasks_of(machine, case.workload, draws=True))
    with SWPipeline(case.plan, tasks, device="cpu", seed=SEED, **options) as pipe:
        iterator = caller.batches()
        if case.seed % 3 == 0:
            pipe.fill_pipeline(iterator)
        while True:
            try:
                caller.take(pipe.progress(iterator))
            except StopIteration:
                break
            assert caller.nothing_is_held()
            if len(caller.found) in case.drains:
                caller.take_all(pipe.drain())
                assert pipe.in_flight == 0
                assert caller.nothing_is_held()
                iterator = caller.batches()
        assert pipe.in_flight == 0
    return caller.found, machine


def run_serially(case: Case, *, one_by_one: bool) -> tuple[list[dict[str, Any]], TorchMachine]:
    """Return the same for a serial run, by one call per iteration or one call for all."""
    machine, caller = TorchMachine(case.workload, lambda: None), Caller(case)
    tasks = tasks_of(machine, case.workload, draws=True)
    with SWPipeline(case.plan, tasks, device="cpu", seed=SEED) as pipe:
        if one_by_one:
            for i, batch in enumerate(case.batches):
                caller.take(pipe.run_one_serial_iter(batch, i))
        else:
            assert pipe.run_serial(case.batches).iterations == len(case.batches)
    return caller.found, machine


def assert_same_bits(found: Any, wanted: Any) -> None:
    """Check that two values have equal structure, and tensors with equal bits."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found.detach().view(torch.int32), wanted.detach().view(torch.int32))
    elif isinstance(wanted, list | dict):
        assert type(found) is type(wanted)
        assert len(found) == len(wanted)
        for key in wanted if isinstance(wanted, dict) else range(len(wanted)):
            assert_same_bits(found[key], wanted[key])
    else:
        assert found == wanted


@examples("plans", EXAMPLES)
@given(cases() | cases(most_workers=4))
def test_every_plan_gives_the_bits_of_the_serial_run(case: Case) -> None:
    """Outputs and parameters are equal; each batch comes once, in order; the depth is a limit.

    A check of effects finds no problem; some states have several slots, used alternately.
    """
    found, machine = run_pipelined(case, check_effects=case.seed % 3 == 0)
    wanted, serial = run_serially(case, one_by_one=True)
    assert_same_bits(found, wanted)
    assert_same_bits(machine.states, serial.states)
    if case.seed % 3 == 1:
        _, serial_at_once = run_serially(case, one_by_one=False)
        assert_same_bits(serial_at_once.states, serial.states)
