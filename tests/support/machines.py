"""The actions of a random workload's tasks, on plain numbers and on torch tensors.

Only ``run_task`` interprets a ``TaskSpec``; a *machine* defines its values. All arithmetic depends
on the order of its operands, so that any change of order shows in the numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from swpipe import IterContext, PipelineTask
from tests.support.plans_for_tests import NOBODY_ELSE
from tests.support.strategies import TaskSpec, Workload

MODULUS = 2**61 - 1


class Machine(Protocol):
    """The interface of a machine, which makes and changes values.

    Attributes:
        states: State to its slots, which ``change`` modifies in place.
        plain: The machine of the tasks of the host alone.
    """

    states: dict[str, list[Any]]

    @property
    def plain(self) -> Machine: ...

    def compute(self, tag: int, inputs: Sequence[Any], spec: TaskSpec, i: int) -> Any:
        """Return a new value made from ``inputs``, in their order."""

    def change(self, slot: Any, tag: int, inputs: Sequence[Any], spec: TaskSpec, i: int) -> None:
        """Mix ``inputs`` into a slot."""

    def pause(self) -> None:
        """Pause between two steps of a task."""


def run_task(machine: Machine, number: int, spec: TaskSpec, ctx: IterContext) -> None:
    """Run a task on an iteration: read, change states, set and delete attributes."""
    i = ctx.iter_idx
    if spec.on_host:
        machine = machine.plain
    slots = [slot_of(machine, use.state, i) for use in spec.states]
    inputs = [value for name in spec.reads if (value := unpacked(getattr(ctx, name))) is not None]
    inputs += slots
    saved: dict[tuple[str, int], Any] = vars(machine).setdefault("saved", {})
    if spec.saves is not None:
        saved[spec.name, i] = unpacked(getattr(ctx, spec.saves))
    if spec.takes is not None and (value := saved.pop((spec.takes, i))) is not None:
        inputs.append(value)
    value = None  # only what is saved, or in the context, refers to it beyond the task's inputs
    for use, slot in zip(spec.states, slots, strict=True):
        if use.writes:
            machine.pause()
            machine.change(slot, number, inputs, spec, i)
    for n, name in enumerate(spec.sets):
        machine.pause()
        made = machine.compute(100 * (n + 1) + number, inputs, spec, i)
        setattr(ctx, name, (made, [made], {"x": (made,)})[(number + n) % 3])
    for old, new in spec.passes:
        setattr(ctx, new, getattr(ctx, old))
    if spec.carries is not None:
        state, old, new = spec.carries
        slot = slot_of(machine, state, i)
        setattr(ctx, new, slot[1] if len(slot) > 1 else None)
        slot[1:] = [getattr(ctx, old)]
    for name in spec.deletes:
        delattr(ctx, name)
    machine.pause()


def slot_of(machine: Machine, state: str, i: int) -> Any:
    """Return the slot of a state that iteration i uses."""
    slots = machine.states[state]
    return slots[i % len(slots)]


def unpacked(value: Any) -> Any:
    """Return the value inside the containers that ``run_task`` puts around some values."""
    while isinstance(value, list | tuple | dict):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


def outputs(ctx: IterContext) -> dict[str, Any]:
    """Return the attributes that an iteration left in its context."""
    return {name: unpacked(value) for name, value in vars(ctx).items() if name != "iter_idx"}


def tasks_of(machine: Machine, workload: Workload, *, draws: bool = False) -> list[PipelineTask]:
    """Return the workload's tasks on a machine; with ``draws``, some declare random draws."""
    return [
        PipelineTask(
            spec.name,
            partial(run_task, machine, number, spec),
            io=[NOBODY_ELSE] * (draws and spec.draws),
            random=draws and spec.draws,
            reads=reads_of(spec),
        )
        for number, spec in enumerate(workload.tasks)
    ]


def reads_of(spec: TaskSpec) -> list[str] | None:
    """Return the attributes that a task declares to use."""
    return [*spec.touches()] if spec.known else None


def serial_outputs(
    machine: Machine,
    workload: Workload,
    batches: Iterable[Any],
    keep: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return the outputs of a plain loop without swpipe's engine, limited to ``keep``."""
    found = []
    for i, batch in enumerate(batches):
        ctx = IterContext(batch, i)
        for number, spec in enumerate(workload.tasks):
            run_task(machine, number, spec, ctx)
        left = outputs(ctx)
        found.append({name: v for name, v in left.items() if keep is None or name in keep})
    return found


def mix(tag: int, values: Iterable[int]) -> int:
    """Return a number that depends on each value and on their order."""
    for value in values:
        tag = (tag * 1_000_003 + value + 1) % MODULUS
    return tag


class PlainMachine:
    """A machine of numbers; a slot has one, and a value that is carried to a later iteration."""

    def __init__(self, workload: Workload) -> None:
        slots = workload.slots | workload.host_slots
        self.states = {name: [[n] for n in range(count)] for name, count in slots.items()}

    @property
    def plain(self) -> PlainMachine:
        return self

    def compute(self, tag: int, inputs: Sequence[Any], spec: TaskSpec, i: int) -> int:
        return mix(tag, [v[0] if isinstance(v, list) else v for v in inputs])

    def change(self, slot: Any, tag: int, inputs: Sequence[Any], spec: TaskSpec, i: int) -> None:
        slot[0] = self.compute(tag, [*inputs, slot], spec, i)

    def pause(self) -> None:
        return None


class TorchMachine:
    """A machine of float32 tensors of size 3; a slot is a parameter, modified in two steps."""

    def __init__(self, workload: Workload, pause: Callable[[], None]) -> None:
        self.pause = pause
        self.plain = PlainMachine(Workload((), {}, workload.host_slots))
        self.states = {
            name: [torch.nn.Parameter(torch.full((3,), 0.1 * n)) for n in range(slots)]
            for name, slots in workload.slots.items()
        }

    def compute(self, tag: int, inputs: Sequence[Any], spec: TaskSpec, i: int) -> torch.Tensor:
        value = torch.tensor([0.01, 0.02, 0.03]) * (tag % 97)
        if spec.draws:
            value = value + torch.rand(3)
        for other in inputs:
            value = torch.sin(1.7 * value + other)
        return value.detach()

    @torch.no_grad()
    def change(self, slot: Any, tag: int, inputs: Sequence[Any], spec: TaskSpec, i: int) -> None:
        value = self.compute(tag, inputs, spec, i)
        slot.mul_(0.9)
        self.pause()
        slot.add_(value)


def random_pauses(seed: int, longest_us: float = 150.0) -> Callable[[], None]:
    """Return a function with random pauses, mostly of length 0, which disturb threads."""
    rng = random.Random(seed)

    def pause() -> None:
        kind = rng.random()
        if kind < 0.15:
            time.sleep(0)
        elif kind < 0.3:
            until = time.perf_counter() + rng.random() * longest_us * 1e-6
            while time.perf_counter() < until:
                pass
        elif kind < 0.4:
            time.sleep(rng.random() * longest_us * 1e-6)

    return pause
