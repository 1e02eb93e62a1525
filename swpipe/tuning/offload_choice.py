"""The choice of how much to offload, so that a plan holds at most a given number of bytes."""

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
    """The chosen pairs to offload, with the plan and tasks that use them.

    Attributes:
        plan: The plan, including the tasks of the pairs.
        tasks: The tasks, including those of the pairs.
        pairs: The pairs that are used.
        peak_bytes: The predicted peak of memory on the device under the plan, including memory of
            unused pairs that outlives iterations.
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
    """Offload the smallest number of pairs with which the plan holds at most ``max_bytes``.

    Each number of pairs that is tried is measured in serial iterations, after which all state is
    restored.

    Args:
        tasks: The tasks without those of the pairs.
        plan: A plan for these tasks.
        pairs: The pairs, in the order of use. Put pairs with the longest time between their two
            tasks first, such as the first layers.
        batches: The batches to measure on; see ``measure_memory``.
        max_bytes: The most memory that may be held on the device.
        device: See ``SWPipeline``.
        state: The state to restore; see ``measure_memory``.

    Raises:
        PlanError: All pairs together are not enough; the message contains the least peak.
    """
    tasks = tuple(tasks)
    batches = [*batches]
    place = resolve(device)

    def chosen(count: int) -> OffloadChoice:
        used = pairs[:count]
        of_pairs = offloaded(tasks, used)
        planned = with_offload(plan, used)
        # Offloading changes when tensors are freed, so memory is measured with the tasks of the
        # pairs.
        memory = measure_memory(of_pairs, batches, device=place, state=state, keep=plan.keep)
        blocks = [block for pair in used if (block := pair.resident()) is not None]
        memory = replace(memory, blocks=(*memory.blocks, *blocks))
        # Only memory matters here. Equal costs suffice, since the plan fixes the order of tasks.
        costs = CostModel({task.name: TaskCost(1.0) for task in of_pairs}, memory=memory)
        peak = peak_of(planned, costs, streams=place.has_streams)
        # The memory of an unused pair stays on the device, although no measured task touches it.
        unused = (pair.resident() for pair in pairs[count:])
        size = sum(block.bytes for block in unused if block is not None)
        return OffloadChoice(planned, of_pairs, tuple(used), size + (peak.bytes if peak else 0))

    # Binary search for the smallest number: with more pairs, the plan never holds more.
    fewest = 0
    most = len(pairs)
    best = chosen(most)
    if best.peak_bytes > max_bytes:
        text = (
            f"all {most} pairs together hold {in_bytes(best.peak_bytes)}, more than max_bytes of "
            f"{in_bytes(max_bytes)}: allow that, give more pairs, or take smaller batches"
        )
        raise PlanError([Problem(text)])
    while fewest < most:  # ``most`` pairs are known to suffice
        count = (fewest + most) // 2
        tried = chosen(count)
        if tried.peak_bytes <= max_bytes:
            best = tried
            most = count
        else:
            fewest = count + 1
    return best
