"""The published generator of zero-bubble V schedules, with the interface of seed 003."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

from swpipe.core.messages import shown
from swpipe.plans.pipeline_parallel.action import ScheduleError
from swpipe.plans.pipeline_parallel.pipeline_costs import PipelineCosts, is_positive, require_counts
from swpipe.plans.pipeline_parallel.published_attempt import (
    AttemptResult,
    Sizes,
    best_attempt,
    try_twice,
)
from swpipe.plans.pipeline_parallel.published_nodes import nodes_of
from swpipe.plans.pipeline_parallel.scheduled_node import ScheduledNode


@dataclass(frozen=True, slots=True)
class PipelineGraph:
    """Zero-bubble V schedules, made by the published method.

    A stage of this class is a rank with two chunks of the model: chunk 0 on the way down the V,
    from stage 0 to the last, chunk 1 on the way up. Times and memory have any units; integers stay
    integers. Nothing is printed.

    Source: seed 003.

    Attributes:
        n_stage: The number of stages.
        n_micro: The number of microbatches.
        f_cost: The time of the forward pass of a chunk.
        b_cost: The time of the backward pass for the input.
        w_cost: The time of the backward pass for the weights.
        c_cost: The latency between two stages.
        f_mem: What the forward pass adds to the memory of its stage.
        b_mem: What the backward pass for the input adds, 0 or below.
        w_mem: What the backward pass for the weights adds, 0 or below.
        max_mem: The memory of each stage; None or 0 means 2 * n_stage * f_mem.

    Raises:
        ScheduleError: A size or a cost is not above 0, memory grows with each microbatch, or
            ``max_mem`` is below 2 * f_mem.
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
        wrong = [
            f"{name} is {shown(value)}: one number above 0, for all stages"
            for name in ("f_cost", "b_cost", "w_cost", "c_cost")
            if not is_positive(value := getattr(self, name))
        ]
        if wrong:
            raise ScheduleError("; ".join(wrong))
        memory = (self.f_mem, self.b_mem, self.w_mem, self.max_mem)
        costs = PipelineCosts(self.f_cost, self.b_cost, self.w_cost, self.c_cost, *memory)
        costs.require_room()
        object.__setattr__(self, "max_mem", costs.limit(2 * self.n_stage))

    def get_id(self, cat: int, chunk: int, stage: int, micro: int) -> int:
        """The index of a pass in ``end_time``.

        Args:
            cat: 0 for F, 1 for B, 2 for W.
            chunk: The raw chunk, in the order of the work: of F the physical chunk, of B and W 1
                minus that.
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
        """Make a schedule, make it again with its bubbles approved, and keep the better one.

        Args:
            fill_f: Whether a W pass may delay an F pass where that waits too long.
            fill_b: Whether it may delay the B pass of a microbatch's first backward half.
            approved_bubble: The bubble per stage that need not be avoided.

        Raises:
            ScheduleError: The method finds no schedule within ``max_mem``.
        """
        if approved_bubble is not None and len(approved_bubble) != self.n_stage:
            raise ScheduleError(
                f"approved_bubble has {len(approved_bubble)} numbers: one per stage, {self.n_stage}"
            )
        return try_twice(self._sizes(), fill_f, fill_b, approved_bubble)

    @overload
    def get_v_schedule(
        self, only_run_time: Literal[False] = False
    ) -> list[list[ScheduledNode]]: ...

    @overload
    def get_v_schedule(self, only_run_time: Literal[True]) -> float: ...

    def get_v_schedule(self, only_run_time: bool = False) -> list[list[ScheduledNode]] | float:
        """The best of the four ways to fill waits: nodes per stage, or the run time alone.

        The run time is the work of a stage and the largest bubble: what a step takes in the long
        run where no collective joins the stages.

        Raises:
            ScheduleError: The method finds no schedule within ``max_mem``.
        """
        best = best_attempt(self._sizes())
        if only_run_time:
            return best.max_bubble + sum(self._sizes().costs) * self.n_micro * 2
        return nodes_of(self._sizes(), best)

    def _sizes(self) -> Sizes:
        return Sizes(
            self.n_stage,
            self.n_micro,
            (self.f_cost, self.b_cost, self.w_cost),
            self.c_cost,
            (self.f_mem, self.b_mem, self.w_mem),
            (self.max_mem or 0) * (1 + 1e-9),  # sums of floats are a little off
        )
