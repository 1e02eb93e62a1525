"""The predicted and the measured memory of random plans, in virtual time.

Their tasks take the time, and make and free the memory, that a seed gives.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from swpipe import IterContext, PipelineTask, SWPipeline
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import simulate
from swpipe.profiler import measure_memory
from swpipe.trace.bytes_in_flight import PeakMemory
from tests.support.live_bytes import LiveBytes
from tests.support.machines import reads_of
from tests.support.strategies import TaskSpec, keeping_case, random_case
from tests.support.virtual_clock import TimedHost, tell_time

KIB = 2**10
ITERATIONS = 40


class MemoryWork:
    """A random plan with tasks that allocate; ``costs`` has their times and memory.

    Attributes:
        live: The values of it that are alive in ``run``.
    """

    def __init__(self, seed: int, device: Any = "cpu", *, keeps_all: bool = True) -> None:
        case = random_case(seed) if keeps_all else keeping_case(seed)
        rng = random.Random(seed)
        self.plan, self.device, self.host = replace(case.plan, stale={}), device, TimedHost(seed)
        self.live = LiveBytes()
        specs = case.workload.tasks
        self.sizes = {
            (spec.name, name): rng.choice((1, 8, rng.randint(1, 64))) * KIB
            for spec in specs
            for name in spec.sets
        }
        costs = {spec.name: TaskCost(rng.uniform(1, 50)) for spec in specs}
        needs = {spec.name: rng.choice((0, rng.randint(1, 32))) * KIB for spec in specs}
        self.tasks = [self._task(s, costs[s.name].host_us, needs[s.name]) for s in specs]
        memory = measure_memory(self.tasks, [self._batch()], device=device, keep=self.plan.keep)
        self.costs = CostModel(costs, memory=memory)

    def _task(self, spec: TaskSpec, host_us: float, need: int) -> PipelineTask:
        def fn(ctx: IterContext) -> None:
            made = {name: self._empty(self.sizes[spec.name, name]) for name in spec.sets}
            needed = self._empty(need)
            self.host.sleep(host_us / 1e6)
            del needed
            for name in spec.sets:
                setattr(ctx, name, made.pop(name))
            for old, new in spec.passes:
                setattr(ctx, new, getattr(ctx, old))
            for name in spec.deletes:
                delattr(ctx, name)

        return PipelineTask(spec.name, fn, reads=reads_of(spec))

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _batch(self) -> torch.Tensor:
        return self._empty(4 * KIB)

    def predicted(self, *, streams: bool) -> PeakMemory:
        """Return the simulator's prediction of the peak."""
        found = simulate(self.plan, self.costs, streams=streams).memory
        assert found is not None
        return found

    def run(self, order: int) -> None:
        """Run the plan; ``order`` decides which of two threads goes first at one moment."""
        self.host, self.live = TimedHost(order), LiveBytes()
        batches = self.live.batches(self._batch() for _ in range(ITERATIONS))
        with pytest.MonkeyPatch.context() as patch:
            tell_time(patch, self.host)
            tasks = self.live.watched(self.tasks)
            with SWPipeline(
                self.plan, tasks, device=self.device, check_effects=False, stall_timeout_s=None
            ) as pipe:
                pipe.run(batches)
