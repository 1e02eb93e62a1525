"""A random workload on the virtual device: numbers in buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from swpipe import IterContext, PipelineTask
from swpipe.program import Program
from tests.device.virtual import Buffer, Violation, VirtualDevice, Work
from tests.device.virtual.clocks import Stamp
from tests.support.machines import PlainMachine, mix, reads_of, run_task
from tests.support.strategies import Case, TaskSpec, Workload


class OutOfTurn(Violation):
    """A globally ordered task was called without being ordered after the previous one."""


class PlantedError(Exception):
    """An error that a test raises on purpose."""


class VirtualMachine:
    """A machine of numbers in buffers; a slot is a buffer that is written repeatedly.

    Attributes:
        turns: (task, iteration) of the globally ordered tasks, as called.
        fails_at: The (task, iteration) that is to fail.
    """

    def __init__(self, device: VirtualDevice, case: Case, pause: Callable[[], None]) -> None:
        self.turns: list[tuple[str, int]] = []
        self.fails_at: tuple[str, int] | None = None
        self.pause = pause
        self._case = case
        self._device = device
        self._last_turn: Stamp | None = None
        self.plain = PlainMachine(Workload((), {}, case.workload.host_slots))
        # Launched, not there from the start: all that the pipeline launches has to come after.
        self.states = {
            name: [device.launch(lambda n=n: n) for n in range(slots)]
            for name, slots in case.workload.slots.items()
        }

    def compute(self, tag: int, inputs: Sequence[Any], spec: TaskSpec, i: int) -> Buffer:
        return self._launch(tag, inputs, None, Work(spec.name, i))

    def change(self, slot: Any, tag: int, inputs: Sequence[Any], spec: TaskSpec, i: int) -> None:
        self._launch(tag, [*inputs, slot], slot, Work(spec.name, i))

    def _launch(self, tag: int, inputs: Sequence[Any], into: Buffer | None, work: Work) -> Buffer:
        # The function must not hold the buffers: work under way keeps no memory alive.
        there = [None if isinstance(value, Buffer) else value for value in inputs]
        buffers = [value for value in inputs if isinstance(value, Buffer)]
        return self._device.launch(partial(_mix_with, tag, there), *buffers, into=into, work=work)

    def tasks(self) -> list[PipelineTask]:
        """Return the case's tasks; globally ordered ones check that they run in order."""
        specs = enumerate(self._case.workload.tasks)
        return [
            PipelineTask(spec.name, partial(self._run, n, spec), reads=reads_of(spec))
            for n, spec in specs
        ]

    def _run(self, number: int, spec: TaskSpec, ctx: IterContext) -> None:
        if self._case.plan.schedule[spec.name].globally_ordered:
            self._take_turn(spec.name, ctx.iter_idx)
        run_task(self, number, spec, ctx)
        if self.fails_at == (spec.name, ctx.iter_idx):
            raise PlantedError

    def _take_turn(self, task: str, i: int) -> None:
        clocks = self._device.clocks
        if self._last_turn is not None and not clocks.knows(self._last_turn):
            self._device.report(OutOfTurn(f"{task} of iteration {i}"))
        self._last_turn = clocks.step()
        self.turns.append((task, i))


def _mix_with(tag: int, there: Sequence[int | None], *given: int) -> int:
    ahead = iter(given)
    return mix(tag, [next(ahead) if value is None else value for value in there])


def turns_of(case: Case, program: Program) -> list[tuple[str, int]]:
    """Return the globally ordered tasks in the order that every rank must keep."""
    stage = {name: ins.stage for name, ins in program.instructions.items()}
    ordered = [name for name in program.tasks if case.plan.schedule[name].globally_ordered]
    count = len(case.batches)
    return [
        (name, period - stage[name])
        for period in range(count + program.depth)
        for name in ordered
        if 0 <= period - stage[name] < count
    ]
