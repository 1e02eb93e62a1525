"""The published generator of zero-bubble V schedules, with the interface of its authors' code.

Each stage (a rank) has two chunks of the model in a V. An attempt numbers the chunks in the order
in which a microbatch reaches them (*raw* chunks), so that one rule holds for both directions::

    kind         0 F0        1 F1        2 B0        3 B1        4 W0, 5 W1
    direction    down        up          down        up
    input from   stage - 1   stage + 1   stage - 1   stage + 1   (its own stage)

F0 is the forward pass of physical chunk 0, but B0 is the backward pass of physical chunk 1, because
the backward pass takes the V in the other direction.

Source: P. Qi et al., "Pipeline parallelism with controllable memory" (2024), as published with
"Zero bubble pipeline parallelism" (2023).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, NoReturn, overload

from swpipe.core.messages import shown
from swpipe.plans.pipeline_parallel.action import ScheduleError
from swpipe.plans.pipeline_parallel.pipeline_costs import (
    PipelineCosts,
    is_number,
    is_positive,
    require_counts,
)

FORWARD = 0
BACKWARD = 1
WEIGHT = 2


class ScheduledNode(NamedTuple):
    """One entry of a stage's list with its times; the names are those of the published code.

    Attributes:
        type: ``F``, ``B`` (the gradient of the input) or ``W``; ``SEND_FORWARD``, ``RECV_FORWARD``,
            ``SEND_BACKWARD``, ``RECV_BACKWARD``; ``POST_VALIDATION``, ``SEND_POST_VALIDATION``,
            ``RECV_POST_VALIDATION``.
        chunk: The physical chunk: 0 on the way down the V, 1 on the way up.
        stage: The rank, from 0.
        minibatch: The microbatch, from 0.
        start_time: The start in the unit of the costs.
        completion_time: The end in the unit of the costs; the start for entries without
            computation.
        rollback: Whether a receive has to be repeated when the optimizer's step is rolled back.
    """

    type: str
    chunk: int
    stage: int
    minibatch: int
    start_time: float
    completion_time: float
    rollback: bool = False


class AttemptResult(NamedTuple):
    """A schedule of the published method, which unpacks as in the published code.

    Attributes:
        schedule: The passes of each stage in order, as (category, raw chunk, microbatch). The
            category is 0 for F, 1 for B and 2 for W.
        end_time: The end of each pass, indexed by ``PipelineGraph.get_id``.
        max_bubble: The largest idle time of a stage between its first start and its last end.
    """

    schedule: list[list[tuple[int, int, int]]]
    end_time: list[float]
    max_bubble: float


@dataclass(frozen=True, slots=True)
class PipelineGraph:
    """A generator of zero-bubble V schedules by the published method.

    A stage of this class is a rank with two chunks of the model: chunk 0 on the way down the V,
    from stage 0 to the last, chunk 1 on the way up. Times and memory have any units; integers stay
    integers.

    Source: seed 003.

    Attributes:
        n_stage: The number of stages.
        n_micro: The number of microbatches.
        f_cost: The time of the forward pass of a chunk.
        b_cost: The time of the backward pass for the input.
        w_cost: The time of the backward pass for the weights.
        c_cost: The latency between two stages; 0 for a free link.
        f_mem: The memory that the forward pass adds to its stage.
        b_mem: The memory that the backward pass for the input adds, usually 0 or negative.
        w_mem: The memory that the backward pass for the weights adds, 0 or negative.
        max_mem: The memory limit of each stage; None or 0 for 2 * n_stage * f_mem.

    Raises:
        ScheduleError: A size or a cost is not above 0, or memory grows with each microbatch.
    """

    n_stage: int
    n_micro: int
    f_cost: float
    b_cost: float
    w_cost: float
    c_cost: float
    f_mem: float
    b_mem: float
    w_mem: float
    max_mem: float | None = None

    def __post_init__(self) -> None:
        require_counts({"n_stage": self.n_stage, "n_micro": self.n_micro})
        # PipelineCosts would accept sequences, one number per stage; this method needs one number.
        wrong = [
            f"{name} is {shown(value)}: give one number above 0, for all stages"
            for name in ("f_cost", "b_cost", "w_cost")
            if not is_positive(value := getattr(self, name))
        ]
        if not is_number(self.c_cost) or self.c_cost < 0:
            rule = "give 0 for a free link, or a number above 0"
            wrong.append(f"c_cost is {shown(self.c_cost)}: {rule}")
        if wrong:
            raise ScheduleError("; ".join(wrong))
        memory = (self.f_mem, self.b_mem, self.w_mem, self.max_mem)
        costs = PipelineCosts(self.f_cost, self.b_cost, self.w_cost, self.c_cost, *memory)
        object.__setattr__(self, "max_mem", costs.limit(2 * self.n_stage))

    @property
    def costs(self) -> tuple[float, float, float]:
        """The times of F, B and W."""
        return (self.f_cost, self.b_cost, self.w_cost)

    def get_id(self, cat: int, chunk: int, stage: int, micro: int) -> int:
        """Return the index of a pass in ``end_time``.

        Args:
            cat: The category: 0 for F, 1 for B, 2 for W.
            chunk: The raw chunk: the physical chunk for F, and 1 minus the physical chunk for B and
                W.
            stage: The stage, from 0.
            micro: The microbatch, from 0.
        """
        return ((cat * 2 + chunk) * self.n_stage + stage) * self.n_micro + micro

    def try_v_schedule(
        self,
        fill_f: bool = True,
        fill_b: bool = True,
        approved_bubble: Sequence[float] | None = None,
    ) -> AttemptResult:
        """Make a schedule, and repeat with its bubbles approved while the largest bubble shrinks.

        Args:
            fill_f: Whether a W pass may delay an F pass that would wait too long.
            fill_b: Whether a W pass may delay a B pass of raw chunk 0 that would wait too long.
            approved_bubble: The bubble of each stage that the schedule need not avoid; None for 0.

        Raises:
            ScheduleError: The method finds no schedule within ``max_mem``.
        """
        if approved_bubble is not None and len(approved_bubble) != self.n_stage:
            raise ScheduleError(
                f"approved_bubble has {len(approved_bubble)} numbers: give one for each of the "
                f"{self.n_stage} stages"
            )
        attempt = _Attempt(self, fill_f, fill_b, approved_bubble)
        result = attempt.run()
        # The recursion ends, because the largest bubble shrinks each time.
        if approved_bubble is None or result.max_bubble < max(approved_bubble):
            again = self.try_v_schedule(fill_f, fill_b, attempt.bubble)
            if again.max_bubble < result.max_bubble:
                return again
        return result

    def best_attempt(self) -> AttemptResult:
        """Return the attempt with the smallest ``max_bubble`` of the four ways to fill waits."""
        # The first of equal attempts counts, so that the order of the ways is part of the method.
        ways = ((True, True), (False, True), (True, False), (False, False))
        attempts = [self.try_v_schedule(*way) for way in ways]
        return min(attempts, key=lambda attempt: attempt.max_bubble)

    @overload
    def get_v_schedule(
        self, only_run_time: Literal[False] = False
    ) -> list[list[ScheduledNode]]: ...

    @overload
    def get_v_schedule(self, only_run_time: Literal[True]) -> float: ...

    def get_v_schedule(self, only_run_time: bool = False) -> list[list[ScheduledNode]] | float:
        """Return the best of the four ways to fill waits: nodes per stage, or the run time alone.

        With the nodes, a line is printed: stages, microbatches, costs, the forward passes that the
        memory holds, and the bubble as a share of the run time. The run time is the work of a stage
        and the largest bubble: what a step takes in the long run where no collective joins the
        stages.

        Raises:
            ScheduleError: The method finds no schedule within ``max_mem``.
        """
        best = self.best_attempt()
        run_time = best.max_bubble + sum(self.costs) * self.n_micro * 2
        if only_run_time:
            return run_time
        costs = " ".join(f"{cost:5.0f}" for cost in (*self.costs, self.c_cost))
        held = (self.max_mem or 0) // self.f_mem
        share = best.max_bubble / run_time
        line = f"{self.n_stage:2} {self.n_micro:3}, [{costs}], {held:6.0f} -> {share:6.4f}"
        print(line)  # noqa: T201 - as the published generator does
        rows = []
        for entries in _Nodes(self, best).listed:
            # By time and number only: nodes of the same time and number keep their order.
            entries.sort(key=lambda entry: entry[:2])
            rows.append(_receive_early([node for _, _, node in entries]))
        return [_with_rollback(row, above) for above, row in zip([[], *rows], rows, strict=False)]


class _Attempt:
    """An unfinished schedule of the published method.

    Lists of passes are indexed by kind, then by stage; see the table at the top of the module.
    """

    def __init__(
        self, graph: PipelineGraph, fill_f: bool, fill_b: bool, approved: Sequence[float] | None
    ) -> None:
        n = graph.n_stage
        self.graph = graph
        self.fill_f = fill_f
        self.fill_b = fill_b
        self.memory = (graph.f_mem, graph.b_mem, graph.w_mem)
        self.max_mem = (graph.max_mem or 0) * (1 + 1e-9)  # for the rounding of sums of floats
        self.ends: list[list[list[float]]] = [[[] for _ in range(n)] for _ in range(6)]
        self.clock: list[float] = [0] * n
        self.mem: list[float] = [0] * n
        self.bubble: list[float] = [0] * n
        self.max_bubble: float = 0
        self.pending: list[deque[int]] = [deque() for _ in range(n)]
        self.schedule: list[list[tuple[int, int, int]]] = [[] for _ in range(n)]
        most = max(approved) if approved is not None else 0
        self.left = [most - bubble for bubble in approved] if approved is not None else [0] * n
        """The difference between the largest approved bubble and each stage's approved bubble."""

    def run(self) -> AttemptResult:
        """Make the schedule.

        Raises:
            ScheduleError: The method finds no schedule within the memory.
        """
        self._first_forwards()
        self._fill_the_way_down()
        # Steady state: each round runs one B and at most one F per stage; each microbatch has two
        # of both.
        for _ in range(2 * self.graph.n_micro):
            for stage in range(self.graph.n_stage):
                self._free_memory(BACKWARD, stage)
            for stage, chunk in self._backwards():
                self._fill(2 + chunk, stage, may_delay=chunk == 1 or self.fill_b)
                self._put(2 + chunk, stage)
            for stage in range(self.graph.n_stage):
                if (kind := self._next_forward(stage)) is not None:
                    self._free_memory(FORWARD, stage)
                    self._fill(kind, stage, may_delay=self.fill_f)
                    self._put(kind, stage)
        # Epilogue: the W passes that neither filled a wait nor had to free memory.
        for stage, pending in enumerate(self.pending):
            while pending:
                self._put_weight(stage)
        end_time = list(chain.from_iterable(chain(*self.ends)))
        return AttemptResult(self.schedule, end_time, self.max_bubble)

    # ------------------------------------------------------------ single passes

    def _arrival(self, kind: int, stage: int) -> float | None:
        """Return the time at which the input of a kind's next pass arrives from another stage.

        Returns None if it is not made yet, and 0 if no other stage makes it.
        """
        # Even kinds go down the V, odd kinds up.
        neighbour = stage - 1 if kind % 2 == 0 else stage + 1
        if kind > 3 or not 0 <= neighbour < self.graph.n_stage:
            return 0
        ends = self.ends[kind][neighbour]
        micro = len(self.ends[kind][stage])
        return ends[micro] + self.graph.c_cost if micro < len(ends) else None

    def _put(self, kind: int, stage: int) -> None:
        """Append the next pass of a kind to a stage.

        Raises:
            ScheduleError: The pass has no input yet, exceeds the memory, or does not exist.
        """
        ends = self.ends
        category = kind // 2
        done = ends[kind][stage]
        micro = len(done)
        now = self.clock[stage]
        if micro >= self.graph.n_micro:
            self._fail(f"stage {stage} would get a microbatch too many")
        self.mem[stage] += self.memory[category]
        if self.mem[stage] > self.max_mem:
            self._fail(f"stage {stage} would exceed it")
        # The input comes from the neighbour, and within the stage from the kind before (F1 after
        # F0, B0 after F1, B1 after B0).
        arrival = self._arrival(kind, stage)
        if arrival is None or (0 < kind < 4 and len(ends[kind - 1][stage]) <= micro):
            self._fail(f"stage {stage} would come before what it needs")
        start = max(now, arrival)
        # Waits before a stage's first pass are no bubble.
        if ends[0][stage]:
            self.bubble[stage] += start - now
            self.max_bubble = max(self.max_bubble, self.bubble[stage])
        self.clock[stage] = start + self.graph.costs[category]
        done.append(self.clock[stage])
        self.schedule[stage].append((category, kind % 2, micro))
        if category == BACKWARD:
            self.pending[stage].append(kind + 2)

    def _put_weight(self, stage: int) -> None:
        if not self.pending[stage]:
            self._fail(f"stage {stage} has nothing to free")
        self._put(self.pending[stage].popleft(), stage)

    def _fill(self, kind: int, stage: int, may_delay: bool) -> None:
        """Put W passes into the wait before a pass, and one more if it may delay the pass.

        One more W is put if the remaining wait would make the stage's bubble exceed both the
        largest bubble so far and ``left``.
        """
        pending = self.pending[stage]
        arrival = self._arrival(kind, stage)
        if not arrival:
            return
        while pending and arrival >= self.clock[stage] + self.graph.w_cost:
            self._put_weight(stage)
        if pending and may_delay:
            slack = max(self.max_bubble, self.left[stage]) - self.bubble[stage]
            if arrival - self.clock[stage] > slack:
                self._put_weight(stage)

    def _free_memory(self, category: int, stage: int) -> None:
        while self.mem[stage] + self.memory[category] > self.max_mem:
            self._put_weight(stage)

    def _fail(self, why: str) -> NoReturn:
        raise ScheduleError(
            f"the published method finds no schedule of {self.graph.n_micro} microbatches on "
            f"{self.graph.n_stage} stages in this max_mem: {why}; plan_v_schedule finds one "
            "for every max_mem from 2 * f_mem on"
        )

    # ------------------------------------------------------------ phases

    def _first_forwards(self) -> None:
        """Put the first microbatch's F passes, and F0 of other microbatches while stages wait."""
        n = self.graph.n_stage
        graph = self.graph
        first = self.ends[0]
        for stage in range(n):
            self._put(0, stage)
        self._put(1, n - 1)
        for stage in range(n - 2, -1, -1):
            # While F1 of microbatch 0 is on its way up to this stage, the stages from 0 to here run
            # F0 of further microbatches, if this stage keeps room for two more F passes for each of
            # these stages.
            arrival = self._arrival(1, stage) or 0
            room = self.max_mem - graph.f_mem * (2 + 2 * stage)
            while (
                self.mem[stage] <= room
                and self.clock[stage] + graph.f_cost <= arrival
                and len(first[stage]) < graph.n_micro
            ):
                for above in range(stage + 1):
                    self._put(0, above)
            self._put(1, stage)

    def _fill_the_way_down(self) -> None:
        """Put the other F passes before the first B, with F0 and F1 alternating."""
        n = self.graph.n_stage
        m = self.graph.n_micro
        down = self.ends[0]
        up = self.ends[1]
        kind = 0
        for stage in range(1, n):
            above = stage - 1
            # Until each stage has as many F passes as the stage above, and the stage above has the
            # input of its next F1.
            while (
                len(down[stage]) + len(up[stage]) < len(down[above]) + len(up[above])
                or len(up[stage]) <= len(up[above]) < m
            ):
                for below in range(n - 1, stage - 1, -1):
                    if len(self.ends[kind][below]) < m:
                        self._put(kind, below)
                kind = 1 - kind

    def _backwards(self) -> list[tuple[int, int]]:
        """Return the next B pass of each stage, as (stage, raw chunk), in the order to put them."""
        # Raw chunk 1 if B0 of its microbatch has been put on the stage, and its input has been put
        # or no B0 is left; raw chunk 0 otherwise. In both groups producers come before consumers.
        n = self.graph.n_stage
        m = self.graph.n_micro
        down = self.ends[2]
        up = self.ends[3]
        on_way_up = [
            stage
            for stage in range(n)
            if len(up[stage]) < len(down[stage])
            and (self._arrival(3, stage) is not None or len(down[stage]) >= m)
        ]
        others = sorted(set(range(n)).difference(on_way_up))
        return [*((stage, 1) for stage in reversed(on_way_up)), *((stage, 0) for stage in others)]

    def _next_forward(self, stage: int) -> int | None:
        """Return the kind of the next F pass of a stage; None if no F pass is ready."""
        # F1 has priority over F0: it brings a microbatch nearer to its backward passes.
        m = self.graph.n_micro
        n_down = len(self.ends[0][stage])
        n_up = len(self.ends[1][stage])
        if n_up >= m:
            return None
        if n_up >= n_down:
            return 0
        if self._arrival(1, stage) is not None:
            return 1
        return 0 if n_down < m and self._arrival(0, stage) is not None else None


class _Nodes:
    """The nodes of each stage for passes, communication and validation, as (time, number, node).

    Nodes are sorted by time and then by number. The numbers of communication are lower than those
    of computation, so that communication comes first among nodes of the same time.
    """

    def __init__(self, graph: PipelineGraph, attempt: AttemptResult) -> None:
        self.graph = graph
        self.end_time = attempt.end_time
        self.number = 0
        self.listed: list[list[tuple[float, float, ScheduledNode]]] = [
            [] for _ in range(graph.n_stage)
        ]
        self._add_validation()
        self._add_passes(attempt.schedule)

    def _add_validation(self) -> None:
        """Add the nodes that validate the previous optimizer step, last stage first."""
        graph = self.graph
        time: float = 0
        for stage in range(graph.n_stage - 1, -1, -1):
            # A stage validates one latency before it starts F0 of this microbatch, and not before
            # the stages below, whose result it needs.
            micro = min(2 * (graph.n_stage - 1 - stage), graph.n_micro - 1)
            end = self.end_time[graph.get_id(FORWARD, 0, stage, micro)]
            time = max(time, end - graph.f_cost - graph.c_cost)
            for prefix in ("RECV_", "SEND_", ""):
                first = stage == 0
                last = stage == graph.n_stage - 1
                if not (first and prefix == "SEND_") and not (last and prefix == "RECV_"):
                    node = ScheduledNode(prefix + "POST_VALIDATION", 0, stage, 0, time, time)
                    self.listed[stage].append((time, self.number, node))
                    self.number += 1

    def _add_passes(self, schedule: list[list[tuple[int, int, int]]]) -> None:
        graph = self.graph
        names = {FORWARD: "FORWARD", BACKWARD: "BACKWARD"}
        for stage, row in enumerate(schedule):
            for category, raw, micro in row:
                end = self.end_time[graph.get_id(category, raw, stage, micro)]
                start = end - graph.costs[category]
                chunk = raw if category == FORWARD else 1 - raw
                node = ScheduledNode("FBW"[category], chunk, stage, micro, start, end)
                self.listed[stage].append((start, math.inf, node))
                if category == WEIGHT:
                    continue
                # At the ends of the V the next pass is on the same stage, or there is none.
                to = stage - 1 if raw else stage + 1
                if 0 <= to < graph.n_stage:
                    for prefix, at in (("SEND_", stage), ("RECV_", to)):
                        sent = ScheduledNode(prefix + names[category], chunk, at, micro, end, end)
                        self.listed[at].append((end, self.number, sent))
                self.number += 1


def _receive_early(row: list[ScheduledNode]) -> list[ScheduledNode]:
    """Swap each receive with the pass before it if the receive starts before that pass ends."""
    # A receive that is posted before a pass runs in the background of the pass.
    for i in range(1, len(row)):
        before = row[i - 1]
        node = row[i]
        if (
            before.type in "FBW"
            and node.type in ("RECV_FORWARD", "RECV_BACKWARD")
            and node.start_time <= before.completion_time
        ):
            row[i - 1], row[i] = node, before
    return row


def _with_rollback(row: list[ScheduledNode], above: list[ScheduledNode]) -> list[ScheduledNode]:
    """Return a stage's row with ``rollback`` set for inputs that were sent before validation.

    Args:
        row: The nodes of the stage.
        above: The nodes of the stage above, which sends the inputs; empty for the first stage.
    """
    # The stage above computed these inputs with weights that a rollback would change.
    types = [node.type for node in above]
    sent = above[: types.index("POST_VALIDATION")] if above else []
    unvalidated = {node.minibatch for node in sent if node.type == "SEND_FORWARD"}
    return [
        node._replace(rollback=True)
        if node.type == "RECV_FORWARD" and node.chunk == 0 and node.minibatch in unvalidated
        else node
        for node in row
    ]
