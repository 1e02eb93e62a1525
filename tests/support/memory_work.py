"""What plans are predicted to hold and what their runs hold, in virtual time.

Of random plans, whose tasks take the time and make and free the memory that a seed says, and of
jobs of workloads, whose operators take 1 us each: so two tasks at work at once hold what they need.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
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
    """A random plan with tasks that allocate; ``costs`` say what they take and hold.

    Attributes:
        live: What is alive of it in ``run``.
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
        """What the simulator says of it."""
        found = simulate(self.plan, self.costs, streams=streams).memory
        assert found is not None
        return found

    def run(self, order: int) -> None:
        """Run the plan; ``order`` decides which of two threads goes first at one moment."""
        self.host, self.live = TimedHost(order), LiveBytes()
        given: dict[str, Any] = {"stall_timeout_s": None, "host": self.host}
        batches = self.live.batches(self._batch() for _ in range(ITERATIONS))
        with pytest.MonkeyPatch.context() as patch:
            tell_time(patch, self.host)
            tasks = self.live.watched(self.tasks)
            with SWPipeline(
                self.plan, tasks, device=self.device, check_effects=False, **given
            ) as pipe:
                pipe.run(batches)


class Peaks(NamedTuple):
    """What a plan is predicted to hold at most, and what its run held, in bytes."""

    predicted: int
    measured: int


def peaks_of_job(job: Any, plan: PipelinePlan, iterations: int = 12) -> Peaks:
    """Run a workload's job under a plan, each operator taking 1 us."""
    context = job.context
    tasks = [*job.tasks()]
    memory = measure_memory(tasks, [*job.batches(1)], device="cpu", context=context)
    counts: dict[str, float] = {}
    host, live, alone = TimedHost(), LiveBytes(lambda: host.sleep(1e-6)), LiveBytes()

    def counting(task: PipelineTask) -> PipelineTask:
        def fn(ctx: Any) -> None:
            before = alone.operators
            task.fn(ctx)
            counts[task.name] = 1 + alone.operators - before

        return replace(task, fn=fn)

    def timed(task: PipelineTask) -> PipelineTask:
        def fn(ctx: Any) -> None:
            host.sleep(1e-6)
            task.fn(ctx)

        return replace(task, fn=fn)

    plan, given = replace(plan, tasks=()), {"device": "cpu", "context": context}
    counted = [*map(counting, alone.watched(tasks))]
    with SWPipeline(plan, counted, check_effects=False, **given) as pipe:
        pipe.run_serial(job.batches(2))
    costs = CostModel({name: TaskCost(count) for name, count in counts.items()}, memory=memory)
    found = simulate(plan, costs, streams=False).memory
    with pytest.MonkeyPatch.context() as patch:
        tell_time(patch, host)
        given |= {"host": host, "stall_timeout_s": None}
        ran = [*map(timed, live.watched(tasks))]
        with SWPipeline(plan, ran, check_effects=False, **given) as pipe:
            pipe.run(live.batches(job.batches(iterations)))
    assert found is not None
    return Peaks(found.bytes, live.peak)
