"""How much to offload, so that a plan holds no more than a given number of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.messages import in_bytes
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.device import Device, resolve
from swpipe.device.offload import Offload, offloaded, with_offload
from swpipe.errors import PlanError, Problem
from swpipe.planning.simulation.simulator import peak_of
from swpipe.profiler.memory_use import measure_memory


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    """What is offloaded, and what the iterations in flight then hold.

    Attributes:
        plan: The plan with the tasks of the pairs.
        tasks: The tasks, with those of the pairs.
        pairs: The pairs that are used.
        peak_bytes: What the plan is predicted to hold on the device at most, with memory of unused
            pairs that outlives iterations.
    """

    plan: PipelinePlan
    tasks: tuple[PipelineTask, ...]
    pairs: tuple[Offload, ...]
    peak_bytes: int


def choose_offload(
    tasks: Iterable[PipelineTask],
    plan: PipelinePlan,
    pairs: Sequence[Offload],
    batches: Iterable[Any],
    *,
    max_bytes: int,
    device: Device | torch.device | str | None = None,
    state: Any = None,
) -> OffloadChoice:
    """Offload as few pairs as hold at most ``max_bytes``.

    Each number of pairs that is tried is measured in serial iterations, after which all state is
    put back.

    Args:
        tasks: The tasks without those of the pairs.
        plan: A plan for them.
        pairs: The first are used first: give those with the longest time between their two tasks,
            such as the first layers.
        batches: To measure on, as for ``measure_memory``.
        max_bytes: What may be held on the device at most.
        device: As for ``SWPipeline``.
        state: What to put back, as for ``measure_memory``.

    Raises:
        PlanError: All pairs together are not enough; the message has the least peak.
    """
    tasks = tuple(tasks)
    batches = [*batches]
    place = resolve(device)

    def chosen(count: int) -> OffloadChoice:
        used = pairs[:count]
        of_pairs = offloaded(tasks, used)
        planned = with_offload(plan, used)
        memory = measure_memory(of_pairs, batches, device=place, state=state, keep=plan.keep)
        blocks = [block for pair in used if (block := pair.resident()) is not None]
        memory = replace(memory, blocks=(*memory.blocks, *blocks))
        costs = CostModel({task.name: TaskCost(1.0) for task in of_pairs}, memory=memory)
        peak = peak_of(planned, costs, streams=place.has_streams)
        unused = (pair.resident() for pair in pairs[count:])
        size = sum(block.bytes for block in unused if block is not None)
        return OffloadChoice(planned, of_pairs, tuple(used), size + (peak.bytes if peak else 0))

    fewest = 0
    most = len(pairs)
    best = chosen(most)
    if best.peak_bytes > max_bytes:
        text = (
            f"all {most} pairs together hold {in_bytes(best.peak_bytes)}, more than max_bytes of "
            f"{in_bytes(max_bytes)}: allow that, give more pairs, or take smaller batches"
        )
        raise PlanError([Problem(text)])
    while fewest < most:  # more pairs hold no more
        count = (fewest + most) // 2
        tried = chosen(count)
        if tried.peak_bytes <= max_bytes:
            best = tried
            most = count
        else:
            fewest = count + 1
    return best
