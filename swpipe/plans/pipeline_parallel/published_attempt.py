"""One attempt of the published zero-bubble V method: times and order of every pass.

Each stage (a rank) has two chunks of the model in a V. The attempt is written in *raw* chunks,
which count in the order of the work, so that one rule serves both directions::

    kind     0 F0   1 F1   2 B0   3 B1     the result comes from     then 4 W0, 5 W1
    way      down   up     down   up       stage - 1, or stage + 1

F0 is the forward pass of physical chunk 0, but B0 the backward pass of physical chunk 1: the
backward pass takes the V in the other direction.

Source: seed 003, section "try_v_schedule"; the method is that of P. Qi et al., "Pipeline
parallelism with controllable memory" (2024), as published with "Zero bubble pipeline parallelism"
(2023).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from swpipe.plans.pipeline_parallel.action import ScheduleError

FORWARD, BACKWARD, WEIGHT = 0, 1, 2


class Sizes(NamedTuple):
    """What an attempt is made for: counts, times and memory of F, B and W, and the memory."""

    n_stage: int
    n_micro: int
    costs: tuple[float, float, float]
    hop: float
    memory: tuple[float, float, float]
    max_mem: float


class AttemptResult(NamedTuple):
    """A schedule of the published method; it unpacks as in seed 003.

    Attributes:
        schedule: Per stage, (category, raw chunk, microbatch) in order; F is 0, B is 1, W is 2.
        end_time: The end of each pass, by ``PipelineGraph.get_id``.
        max_bubble: The largest idle time of a stage between its first start and its last end.
    """

    schedule: list[list[tuple[int, int, int]]]
    end_time: list[float]
    max_bubble: float


class Attempt:
    """The schedule as far as it is made."""

    def __init__(
        self, sizes: Sizes, fill_f: bool, fill_b: bool, approved: Sequence[float] | None
    ) -> None:
        n = sizes.n_stage
        self.sizes = sizes
        self.fill_f, self.fill_b = fill_f, fill_b
        self.ends: list[list[list[float]]] = [[[] for _ in range(n)] for _ in range(6)]
        self.clock: list[float] = [0] * n
        self.mem: list[float] = [0] * n
        self.bubble: list[float] = [0] * n
        self.max_bubble: float = 0
        self.pending: list[deque[int]] = [deque() for _ in range(n)]
        self.schedule: list[list[tuple[int, int, int]]] = [[] for _ in range(n)]
        most = max(approved) if approved is not None else 0
        self.left = [most - one for one in approved] if approved is not None else [0] * n
        """How far each stage's approved bubble is below the largest one."""

    def run(self) -> AttemptResult:
        """Make the schedule.

        Raises:
            ScheduleError: The method finds none within the memory.
        """
        self._first_forwards()
        self._fill_the_way_down()
        for _ in range(2 * self.sizes.n_micro):
            self._free_memory(BACKWARD)
            for stage, chunk in self._backwards():
                self._fill(2 + chunk, stage, may_delay=chunk == 1 or self.fill_b)
                self._put(2 + chunk, stage)
            for stage in range(self.sizes.n_stage):
                self._forward(stage)
        for stage, pending in enumerate(self.pending):
            while pending:
                self._put_weight(stage)
        return AttemptResult(
            self.schedule, list(chain.from_iterable(chain(*self.ends))), self.max_bubble
        )

    # ------------------------------------------------------------ single passes

    def _producer(self, kind: int, stage: int) -> list[float] | None:
        """The ends of the passes whose results ``kind`` needs; None where there is no producer."""
        neighbour = stage - 1 if kind % 2 == 0 else stage + 1
        return self.ends[kind][neighbour] if 0 <= neighbour < self.sizes.n_stage else None

    def _put(self, kind: int, stage: int) -> None:
        """Append the next pass of this kind."""
        sizes, ends = self.sizes, self.ends
        category = kind // 2
        done = ends[kind][stage]
        micro = len(done)
        now = start = self.clock[stage]
        if micro >= sizes.n_micro:
            raise _no_schedule(sizes, f"stage {stage} would get a microbatch too many")
        self.mem[stage] += sizes.memory[category]
        if self.mem[stage] > sizes.max_mem:
            raise _no_schedule(sizes, f"stage {stage} would exceed it")
        if kind < 4:
            producer = self._producer(kind, stage)
            if (producer is not None and len(producer) <= micro) or (
                kind and len(ends[kind - 1][stage]) <= micro
            ):
                raise _no_schedule(sizes, f"stage {stage} would come before what it needs")
            if producer is not None and (arrival := producer[micro] + sizes.hop) > now:
                start = arrival
                if ends[0][stage]:
                    self.bubble[stage] += start - now
                    self.max_bubble = max(self.max_bubble, self.bubble[stage])
        self.clock[stage] = end = start + sizes.costs[category]
        done.append(end)
        self.schedule[stage].append((category, kind % 2, micro))
        if category == BACKWARD:
            self.pending[stage].append(kind + 2)

    def _put_weight(self, stage: int) -> None:
        if not self.pending[stage]:
            raise _no_schedule(self.sizes, f"stage {stage} has nothing to free")
        self._put(self.pending[stage].popleft(), stage)

    def _fill(self, kind: int, stage: int, may_delay: bool) -> None:
        """Put W passes into the wait before a pass; one that does not fit, where it may delay."""
        pending, producer = self.pending[stage], self._producer(kind, stage)
        if producer is None or not pending:
            return
        micro = len(self.ends[kind][stage])
        if len(producer) <= micro:
            return
        arrival = producer[micro] + self.sizes.hop
        weight = self.sizes.costs[WEIGHT]
        while pending and arrival >= self.clock[stage] + weight:
            self._put_weight(stage)
        if pending and may_delay:
            slack = max(self.max_bubble, self.left[stage]) - self.bubble[stage]
            if arrival - self.clock[stage] > slack:
                self._put_weight(stage)

    def _free_memory(self, category: int, stages: Sequence[int] | None = None) -> None:
        for stage in range(self.sizes.n_stage) if stages is None else stages:
            while self.mem[stage] + self.sizes.memory[category] > self.sizes.max_mem:
                self._put_weight(stage)

    # ------------------------------------------------------------ phases

    def _first_forwards(self) -> None:
        """The first microbatch down the V and up again, with F0 of others where time allows."""
        n, f = self.sizes.n_stage, self.sizes.costs[FORWARD]
        first = self.ends[0]
        for stage in range(n):
            self._put(0, stage)
        self._put(1, n - 1)
        for stage in range(n - 2, -1, -1):
            arrival = self.ends[1][stage + 1][0] + self.sizes.hop
            room = self.sizes.max_mem - self.sizes.memory[FORWARD] * (2 + 2 * stage)
            while (
                self.mem[stage] <= room
                and self.clock[stage] + f <= arrival
                and len(first[stage]) < self.sizes.n_micro
            ):
                for above in range(stage + 1):
                    self._put(0, above)
            self._put(1, stage)

    def _fill_the_way_down(self) -> None:
        """The F passes that are left before the first B, F0 and F1 in turns."""
        n, m = self.sizes.n_stage, self.sizes.n_micro
        down, up = self.ends[0], self.ends[1]
        kind = 0
        for stage in range(1, n):
            above = stage - 1
            while (
                len(down[stage]) + len(up[stage]) < len(down[above]) + len(up[above])
                or len(up[stage]) <= len(up[above]) < m
            ):
                for below in range(n - 1, stage - 1, -1):
                    if len(self.ends[kind][below]) < m:
                        self._put(kind, below)
                kind = 1 - kind

    def _backwards(self) -> list[tuple[int, int]]:
        """The B pass that each stage does next, as (stage, raw chunk), in the order to put them."""
        n, m = self.sizes.n_stage, self.sizes.n_micro
        down, up = self.ends[2], self.ends[3]
        on_way_up = [
            stage
            for stage in range(n)
            if (micro := len(up[stage])) < len(down[stage])
            and (stage == n - 1 or len(up[stage + 1]) > micro or len(down[stage]) >= m)
        ]
        others = sorted(set(range(n)).difference(on_way_up))
        return [*((stage, 1) for stage in reversed(on_way_up)), *((stage, 0) for stage in others)]

    def _forward(self, stage: int) -> None:
        """The F pass that a stage does next, if it has one that is ready."""
        kind = self._next_forward(stage)
        if kind is None:
            return
        self._free_memory(FORWARD, (stage,))
        self._fill(kind, stage, may_delay=self.fill_f)
        self._put(kind, stage)

    def _next_forward(self, stage: int) -> int | None:
        n, m = self.sizes.n_stage, self.sizes.n_micro
        down, up = self.ends[0], self.ends[1]
        n_down, n_up = len(down[stage]), len(up[stage])
        if n_up >= m:
            return None
        if n_up >= n_down:
            return 0
        if stage == n - 1 or len(up[stage + 1]) > n_up:
            return 1
        if n_down < m and (stage == 0 or len(down[stage - 1]) > n_down):
            return 0
        return None


def try_twice(
    sizes: Sizes, fill_f: bool, fill_b: bool, approved: Sequence[float] | None = None
) -> AttemptResult:
    """The attempt, and as long as its largest bubble shrinks one more with its bubbles approved."""
    attempt = Attempt(sizes, fill_f, fill_b, approved)
    result = attempt.run()
    if approved is None or result.max_bubble < max(approved):
        again = try_twice(sizes, fill_f, fill_b, attempt.bubble)
        if again.max_bubble < result.max_bubble:
            return again
    return result


def best_attempt(sizes: Sizes) -> AttemptResult:
    """The one with the smallest largest bubble of the four ways to fill waits."""
    attempts = [
        try_twice(sizes, fill_f, fill_b) for fill_b in (True, False) for fill_f in (True, False)
    ]
    return min(attempts, key=lambda attempt: attempt.max_bubble)


def _no_schedule(sizes: Sizes, why: str) -> ScheduleError:
    return ScheduleError(
        f"the published method finds no schedule of {sizes.n_micro} microbatches on "
        f"{sizes.n_stage} stages in this max_mem: {why}; plan_v_schedule finds one "
        "for every max_mem from 2 * f_mem on"
    )
