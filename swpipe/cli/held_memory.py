"""What a plan holds of memory, as `swpipe profile` says it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from swpipe.core.messages import in_bytes
from swpipe.core.plan import PipelinePlan
from swpipe.planning.simulation.simulator import peak_of

if TYPE_CHECKING:
    from swpipe.profiler import ProfileResult
    from swpipe.tuning.autotuning import Loop


def format_memory(loop: Loop, plan: PipelinePlan | None, result: ProfileResult) -> str:
    """What a plan, or else the plain loop, holds by the simulator, with the costs of a profile.

    On a device a second line has what its allocator counted in this process, parameters and all.
    """
    costs = replace(result.costs, memory=loop.measure_memory())
    plan = PipelinePlan.serial(loop.tasks) if plan is None else plan
    held = peak_of(plan, costs, streams=loop.has_streams)
    lines = [] if held is None else [held.format()]
    if loop.has_streams:
        allocated, reserved = (
            in_bytes(count())
            for count in (
                torch.accelerator.max_memory_allocated,
                torch.accelerator.max_memory_reserved,
            )
        )
        lines.append(f"the device's allocator: at most {allocated} allocated, {reserved} reserved")
    return "\n".join(lines)
