"""Every plan gives the serial run's bits on streams that are asynchronous for real.

Random tasks and plans, on either device, with late streams and few streams. Freed memory is
poisoned: whoever reads it afterwards reads NaN.

More of them, as ``python -m tests.accelerator.test_random_plans FIRST COUNT``.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("hypothesis")  # a GPU machine's own packages may lack it

from swpipe import SWPipeline
from swpipe._engine import bind, run
from swpipe.device import AcceleratorDevice
from tests import backend
from tests.accelerator.work import SIMULATED
from tests.support import unguarded
from tests.support.machines import outputs, tasks_of
from tests.support.strategies import (
    Case,
    TaskSpec,
    Workload,
    keeping_case,
    random_case,
    with_run_ahead,
)

pytestmark = pytest.mark.skipif(not SIMULATED, reason="needs the test backend")

SEED = 11
CHUNK, CHUNKS = 50, 10
BAD = (
    {},
    {"late_streams": 150.0},
    {"streams": 2},
    {"streams": 1, "late_streams": 50.0},
)


class DeviceMachine:
    """float32 tensors of 3 on a device; a slot is changed in place in two steps."""

    def __init__(self, workload: Workload, device: str, pause: Callable[[], None]) -> None:
        self.pause, self.device = pause, device
        self.states = {
            name: [torch.full((3,), 0.1 * n, device=device) for n in range(slots)]
            for name, slots in workload.slots.items()
        }

    def compute(self, tag: int, inputs: Sequence[Any], spec: TaskSpec, i: int) -> Tensor:
        value = torch.full((3,), 0.01 * (tag % 97), device=self.device)
        if spec.draws:
            value = value + torch.rand(3, device=self.device)
        for other in inputs:
            if not isinstance(other, int):
                value = torch.sin(1.7 * value + other)
        return value

    def change(self, slot: Tensor, tag: int, inputs: Sequence[Any], spec: TaskSpec, i: int) -> None:
        value = self.compute(tag, inputs, spec, i)
        slot.mul_(0.9)
        self.pause()
        slot.add_(value)


def device_pauses(seed: int, longest_us: float = 150.0) -> Callable[[], None]:
    """Work of random length on the current stream, most often none."""
    rng = random.Random(seed)

    def pause() -> None:
        if rng.random() < 0.3:
            backend.lag(rng.random() * longest_us)

    return pause


def on_host(values: dict[str, Any]) -> dict[str, Any]:
    """Outputs as lists; the device must be done."""
    return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in sorted(values.items())}


def results(case: Case, device: str, *, serially: bool) -> tuple[list[Any], list[Any]]:
    """The outputs of all iterations, and the states in the end."""
    pause = (lambda: None) if serially else device_pauses(case.seed)
    machine = DeviceMachine(case.workload, device, pause)
    torch.accelerator.synchronize(device)
    tasks = tasks_of(machine, case.workload, draws=True)
    found: list[dict[str, Any]] = []
    with SWPipeline(case.plan, tasks, device=device, seed=SEED) as pipe:
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
    return [on_host(values) for values in found], slots


def differs(seed: int, case_of: Callable[[int], Case] = random_case) -> bool:
    """Whether a random plan gives other bits than the serial run of its tasks."""
    case, device = with_run_ahead(case_of(seed)), f"sim:{seed % 2}"
    torch.accelerator.set_device_index(seed // 2 % 2)
    with backend.misbehaving(poison=True):
        serial = results(case, device, serially=True)
    with backend.misbehaving(poison=True, **BAD[seed % len(BAD)]):  # type: ignore[arg-type]
        piped = results(case, device, serially=False)
    torch.accelerator.set_device_index(0)
    return repr(piped) != repr(serial)  # NaN is not itself


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_plans_give_the_serial_runs_bits(chunk: int) -> None:
    """Outputs and states, draws included."""
    assert [seed for seed in range(CHUNK * chunk, CHUNK * (chunk + 1)) if differs(seed)] == []


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_plans_with_keep_give_the_serial_runs_bits(chunk: int) -> None:
    """What stays, and states."""
    seeds = range(CHUNK * chunk, CHUNK * (chunk + 1))
    assert [seed for seed in seeds if differs(seed, keeping_case)] == []


def _no_hold(device: AcceleratorDevice, values: object, streams: object) -> None:
    return None


def _no_wait(*args: object) -> Callable[[int], None]:
    return lambda i: None


@pytest.mark.parametrize("guard", ["event waits", "sink waits", "holds", "hold on dropped"])
def test_without_a_guard_some_plan_differs(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plans above stand on: each guard is needed by some of them."""
    if guard == "event waits":
        monkeypatch.setattr(bind, "wait_for_events", _no_wait)
    elif guard == "sink waits":
        monkeypatch.setattr(run, "wait_for_events", _no_wait)
    elif guard == "holds":
        monkeypatch.setattr(AcceleratorDevice, "hold", _no_hold)
    else:
        unguarded.hold_on_dropped(monkeypatch)
    assert any(differs(seed) for seed in range(CHUNK * CHUNKS))


def test_without_a_guard_some_plan_with_keep_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan lets go waits for the device."""
    unguarded.waiting(monkeypatch)
    assert any(differs(seed, keeping_case) for seed in range(CHUNK * CHUNKS))


def main() -> None:
    """Try the seeds that the command line names."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    begin = time.perf_counter()
    iterations = sum(len(random_case(seed).batches) for seed in range(first, first + count))
    wrong = [seed for seed in range(first, first + count) if differs(seed)]
    seconds = time.perf_counter() - begin
    print(f"{count} plans, {iterations} iterations, {seconds:.0f} s; differing: {wrong}")


if __name__ == "__main__":
    main()
