"""What a program does under a cost model, said a second time: by plain recursion.

Times of nothing but uncontended turns. Each says what it waits for, as the engine does, and all
else follows. Slow, and short enough to be seen to be right.
"""

from __future__ import annotations

import sys
from functools import cache

from swpipe._engine.program import ADMIT, RETIRE, SOURCES, Instruction, Program
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import PULL


class Reference:
    """Ends of host work and of device work, in microseconds from the first period's begin."""

    def __init__(self, program: Program, costs: CostModel, iterations: int, streams: bool) -> None:
        self.program, self.costs, self.iterations = program, costs, iterations
        self.streams = streams
        self.chains: dict[object, list[Instruction]] = {}
        for name in program.order:
            for chain in self._used(name) if name not in SOURCES else ():
                self.chains.setdefault(chain, []).append(program.instructions[name])
        self.launched = cache(self._launched)
        self.passed = cache(self._passed)
        self.done = cache(self._done)
        sys.setrecursionlimit(50_000)

    def cost(self, task: str) -> TaskCost:
        pulls = PULL if PULL in self.program.instructions else ADMIT
        return self.costs.tasks.get(PULL if task == pulls else task, TaskCost())

    def exists(self, ins: Instruction, period: int) -> bool:
        return 0 <= period - ins.stage < self.iterations

    def _passed(self, task: str, period: int) -> float:
        """When a lane has passed an instruction."""
        launched = self.launched(task, period)
        if period >= 0 and self.streams and self.cost(task).blocks:
            return max(launched, self.done(task, period))
        return launched

    def _launched(self, task: str, period: int) -> float:
        """When it has given its work to the stream."""
        if period < 0:
            return 0.0
        ins = self.program.instructions[task]
        lane = self.program.lanes[ins.lane].instructions
        waits = [self.passed(lane[ins.position - 1].task, period - (ins.position == 0))]
        for wait in ins.host_waits:
            other = self.program.lanes[wait.lane].instructions[wait.position].task
            if period >= wait.lag:
                waits.append(self.passed(other, period - wait.lag) + self.costs.handover_us)
        limit = self.program.launch_limit
        far = -1 if limit is None else period - 1 - limit
        if task == ADMIT and far >= self.program.depth - 1 and self.exists(ins, period):
            waits.append(self.done(RETIRE, far) + self.costs.handover_us)
        cost = self.cost(task)
        took = cost.host_us if self.streams else cost.total_us
        return max(waits) + (took if self.exists(ins, period) else 0.0)

    def _done(self, task: str, period: int) -> float:
        """When the device has done what an instruction left on its stream."""
        ins = self.program.instructions[task]
        waits = [self.launched(task, period)]
        if not self.exists(ins, period):
            return waits[0]
        for chain in self._used(task):
            ahead = self._ahead(self.chains[chain], ins, period)
            if ahead is not None:
                waits.append(self.done(*ahead))
        for wait in ins.event_waits:
            if wait.producer in SOURCES:
                continue
            producer = self.program.instructions[wait.producer]
            their = period - ins.stage - wait.distance + producer.stage
            if self.exists(producer, their):
                waits.append(self.done(producer.task, their))
        return max(waits) + self.cost(task).device_us

    def _used(self, task: str) -> tuple[object, ...]:
        """What serves the work of a task: its stream, and its resources."""
        cost = self.cost(task)
        used = cost.resources if self.streams and cost.device_us else ()
        return ("stream", self.program.instructions[task].stream), *used

    def _ahead(
        self, chain: list[Instruction], ins: Instruction, period: int
    ) -> tuple[str, int] | None:
        """What was given to the same stream, or to the same resource, last before."""
        for then in range(period, -1, -1):
            for other in reversed(chain[: chain.index(ins)] if then == period else chain):
                if self.exists(other, then):
                    return other.task, then
        return None
