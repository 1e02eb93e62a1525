"""Random cases on CUDA, or on the test backend: either device, with late streams and few streams.

On the test backend freed memory is poisoned: a later read gives NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from swpipe import SWPipeline
from tests import backend
from tests.support.device_work import SIMULATED, device, spin
from tests.support.machines import PlainMachine, outputs, tasks_of
from tests.support.strategies import Case, TaskSpec, Workload, with_run_ahead

DEVICE = device()  # loads the backend

SEED = 11
BAD = (
    {},
    {"late_streams": 150.0},
    {"streams": 2},
    {"streams": 1, "late_streams": 50.0},
)


class DeviceMachine:
    """A machine of float32 tensors of size 3 on a device; a slot is modified in two steps."""

    def __init__(self, workload: Workload, device: str, pause: Callable[[], None]) -> None:
        self.pause, self.device = pause, device
        self.plain = PlainMachine(Workload((), {}, workload.host_slots))
        self.states = {
            name: [torch.full((3,), 0.1 * n, device=device) for n in range(slots)]
            for name, slots in workload.slots.items()
        }

    def compute(self, tag: int, inputs: Sequence[Any], spec: TaskSpec, i: int) -> Tensor:
        value = torch.full((3,), 0.01 * (tag % 97), device=self.device)
        if spec.draws:
            value = value + torch.rand(3, device=self.device)
        for other in inputs:
            value = torch.sin(1.7 * value + (other % 97 if isinstance(other, int) else other))
        return value

    def change(self, slot: Tensor, tag: int, inputs: Sequence[Any], spec: TaskSpec, i: int) -> None:
        value = self.compute(tag, inputs, spec, i)
        slot.mul_(0.9)
        self.pause()
        slot.add_(value)


def device_pauses(seed: int, longest_us: float = 150.0) -> Callable[[], None]:
    """Return a function that sometimes submits work of random length to the current stream."""
    rng = random.Random(seed)

    def pause() -> None:
        if rng.random() < 0.3:
            spin(rng.random() * longest_us / 1e3)

    return pause


def on_host(values: dict[str, Any]) -> dict[str, Any]:
    """Return outputs as lists; the device must be idle."""
    return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in sorted(values.items())}


def results(case: Case, device: str, *, serially: bool) -> tuple[list[Any], list[Any]]:
    """Return the outputs of all iterations, and the final states."""
    pause = (lambda: None) if serially else device_pauses(case.seed)
    machine = DeviceMachine(case.workload, device, pause)
    torch.accelerator.synchronize(device)
    tasks = tasks_of(machine, case.workload, draws=True)
    found: list[dict[str, Any]] = []
    # Memory that is carried to a later iteration is taken for a state, which it is not.
    check = False if any(spec.carries for spec in case.workload.tasks) else None
    with SWPipeline(case.plan, tasks, device=device, seed=SEED, check_effects=check) as pipe:
        if serially:
            contexts = (pipe.run_one_serial_iter(b, i) for i, b in enumerate(case.batches))
        else:
            contexts = pipe.iterate(iter(case.batches))
        for ctx in contexts:
            # Read on the caller's stream, while others are at work; then the context goes.
            values = outputs(ctx)
            found.append({k: v + 0 if isinstance(v, Tensor) else v for k, v in values.items()})
            del ctx, values
    torch.accelerator.synchronize(device)
    slots = [slot.tolist() for slot in chain.from_iterable(machine.states.values())]
    slots += [slot[0] for slot in chain.from_iterable(machine.plain.states.values())]
    return [on_host(values) for values in found], slots


def differs(case: Case) -> bool:
    """Return whether a plan gives other bits than the serial run of its tasks."""
    case, name, seed = with_run_ahead(case), str(DEVICE), case.seed
    with ExitStack() as bad:
        if SIMULATED:
            name = f"sim:{seed % 2}"
            bad.enter_context(torch.accelerator.device_index(seed // 2 % 2))
            bad.enter_context(backend.misbehaving(poison=True))
        serial = results(case, name, serially=True)
        if SIMULATED:
            bad.enter_context(backend.misbehaving(poison=True, **BAD[seed % len(BAD)]))  # type: ignore[arg-type]
        piped = results(case, name, serially=False)
    return repr(piped) != repr(serial)  # NaN is not itself
