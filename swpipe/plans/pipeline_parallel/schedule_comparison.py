"""The comparison of pipeline-parallel schedules for one model under the same costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from swpipe.core.records import Rows
from swpipe.plans.pipeline_parallel.action import ScheduleError
from swpipe.plans.pipeline_parallel.pipeline_costs import OF_STAGES, PipelineCosts, Values
from swpipe.plans.pipeline_parallel.pipeline_schedule import PipelineSchedule
from swpipe.plans.pipeline_parallel.schedule_check import ScheduleReport, check_schedule
from swpipe.plans.pipeline_parallel.torch_orders import torch_schedule
from swpipe.plans.pipeline_parallel.v_order import Objective, VOrders
from swpipe.plans.pipeline_parallel.v_planner import plan_v_schedule
from swpipe.plans.pipeline_parallel.v_starts import published_order


@dataclass(frozen=True, slots=True)
class ComparedSchedule:
    """One schedule of a comparison.

    Attributes:
        name: The name of the schedule, for example "1F1B".
        report: The times and memory of the schedule; None if it does not exist.
        note: The reason why the schedule does not exist, or a remark that it exceeds the memory.
    """

    name: str
    report: ScheduleReport | None
    note: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class ScheduleComparison(Rows):
    """The result of ``compare_schedules``, with times and memory in the units of the costs."""

    compared: tuple[ComparedSchedule, ...]

    def __getitem__(self, name: str) -> ComparedSchedule:
        """Return the schedule with this name."""
        return next(row for row in self.compared if row.name == name)

    def records(self) -> list[dict[str, Any]]:
        """Return one record per schedule; its values are None if the schedule does not exist."""
        return [
            {
                "schedule": row.name,
                "makespan": row.report and row.report.makespan,
                "bubble": row.report and row.report.bubble,
                "peak_memory": row.report and max(row.report.peak_memory),
                "note": row.note,
            }
            for row in self.compared
        ]

    def as_text(self) -> str:
        # Imported here: only the table needs the package.
        from tabulate import tabulate

        rows = [list(record.values()) for record in self.records()]
        headers = ("schedule", "makespan", "bubble", "peak memory", "note")
        return tabulate(rows, headers=headers, floatfmt=".10g", missingval="")


def compare_schedules(
    n_stage: int,
    n_micro: int,
    costs: PipelineCosts,
    *,
    objective: Objective = "makespan",
    effort: float = 1.0,
    seed: int = 0,
) -> ScheduleComparison:
    """Compare 1F1B, interleaved 1F1B, ZBV, DualPipe-V, the published V and a planned V.

    All schedules run the same model of 2 * n_stage parts. A stage of 1F1B consists of two
    neighbouring parts, with the times and the memory of both.

    Args:
        n_stage: The number of ranks.
        n_micro: The number of microbatches.
        costs: The costs of a part: one number for all, or one per rank, or one per part.
        objective: The objective of the planned schedule; see ``plan_v_schedule``.
        effort: The effort of the planned schedule; see ``plan_v_schedule``.
        seed: The seed of the planned schedule.

    Raises:
        ScheduleError: An argument is invalid; see ``plan_v_schedule``.
    """
    # Planned first: it checks the arguments, which the other schedules would report as notes.
    plan = plan_v_schedule(n_stage, n_micro, costs, objective=objective, effort=effort, seed=seed)

    def published() -> PipelineSchedule:
        orders = VOrders(n_stage, n_micro, costs)
        order = published_order(orders)
        if order is None:
            raise ScheduleError("it finds no schedule in this memory")
        return orders.schedule_of(order)

    # Functions, so that a schedule that does not exist becomes a note in ``_compared``.
    makers: dict[str, Callable[[], PipelineSchedule]] = {
        "1F1B": partial(torch_schedule, "1f1b", n_stage, n_micro),
        "interleaved 1F1B": partial(torch_schedule, "interleaved", n_stage, n_micro),
        "ZBV (torch)": partial(torch_schedule, "zbv", n_stage, n_micro),
        "DualPipe-V (torch)": partial(torch_schedule, "dualpipev", n_stage, n_micro),
        "V (published)": published,
        "V (planned)": lambda: plan.schedule,
    }
    # One limit for all, also for 1F1B: its stages are half as many and twice as large.
    limit = costs.limit(2 * n_stage)
    of_1f1b = _of_two_parts(costs, n_stage)
    return ScheduleComparison(
        tuple(
            _compared(name, make, of_1f1b if name == "1F1B" else costs, limit)
            for name, make in makers.items()
        )
    )


def _compared(
    name: str, make: Callable[[], PipelineSchedule], costs: PipelineCosts, limit: float
) -> ComparedSchedule:
    try:
        # Without a time for pairs, DualPipe-V's overlapped passes are counted one after the other.
        schedule = make().in_sequence if costs.pair is None else make()
        # Without a limit: a schedule that exceeds the memory is shown with a note.
        report = check_schedule(schedule, replace(costs, max_mem=math.inf))
    except ScheduleError as error:
        return ComparedSchedule(name, None, str(error))
    # The note tells such a schedule apart from one that cannot run at all.
    over = max(report.peak_memory) > limit
    return ComparedSchedule(name, report, "more memory than max_mem" if over else "")


def _of_two_parts(costs: PipelineCosts, n_ranks: int) -> PipelineCosts:
    """Return the costs of stages that consist of two neighbouring parts each."""

    # Costs per rank are those of each of the rank's two parts.
    def times(value: Values | None) -> Values | None:
        if not isinstance(value, Sequence):
            return value and 2 * value
        if len(value) == 2 * n_ranks:
            return [sum(pair) for pair in zip(value[::2], value[1::2], strict=True)]
        return [2 * part for part in value]

    of_stages: Any = {name: times(getattr(costs, name)) for name in OF_STAGES}
    return replace(costs, **of_stages)
