"""The kinds of device on which the tests run, and their checks of a random case.

    cpu          no streams; threads interleave as badly as can be
    virtual      streams run as late and in as unusual an order as the events allow, and so do
                 threads in every third case; the device checks its rules
    accelerator  CUDA, or else the test backend: streams are really asynchronous, and freed memory
                 is poisoned; in a process of its own, since it cannot be unloaded

A process has the first two, or with ``--accelerator`` the third.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swpipe import PipelinePlan, SWPipeline
from swpipe.device import Device, resolve
from tests.device.virtual import VirtualDevice


@dataclass(frozen=True)
class Kind:
    """A kind of device.

    Attributes:
        name: The name of the kind.
        new: A new device of it; None where it has no streams.
        run: Runs a random case; what is wrong, or something false.
        plans: How many random plans run in one go; without a guard that has no case of its own
            some plan of the first 44 goes wrong on the virtual device.
    """

    name: str
    new: Callable[[], Device] | None
    run: Callable[[Any], object]
    plans: int = 60

    def __str__(self) -> str:
        return self.name


def _on_cpu(case: Any) -> object:
    from tests.device.interleaved import wrong_on_cpu

    return wrong_on_cpu(case)


def _on_virtual(case: Any) -> object:
    from tests.device.virtual.harness import run_any

    return run_any(case)


def _accelerator() -> Device:
    from tests.device.accelerator.work import DEVICE

    return resolve(DEVICE)


def _on_accelerator(case: Any) -> object:
    from tests.device.accelerator.tensor_machine import differs

    return differs(case)


HERE = (Kind("cpu", None, _on_cpu, plans=30), Kind("virtual", VirtualDevice, _on_virtual))
APART = (Kind("accelerator", _accelerator, _on_accelerator, plans=20),)


def pipeline(plan: PipelinePlan, device: Device) -> SWPipeline[Any]:
    """Return a pipeline on a device."""
    return SWPipeline(plan, device=device)
