"""Refuse plans that could give other numbers than a serial run, or take too much memory.

``swpipe.verify`` refuses what cannot run at all. Here stands what may go wrong in some interleaving
of the threads and streams: tasks that touch the same attribute or state in another order than
serially (``swpipe.soundness``), and more bytes in flight than there is room for
(``swpipe.plans.memory``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from swpipe.context import IterContext
from swpipe.effects import Effects, EffectTable, declared_effects
from swpipe.errors import Problem
from swpipe.plan import PipelinePlan
from swpipe.plans.memory import Footprint, Sizes, bytes_in_flight, memory_problems, size_problems
from swpipe.soundness import (
    demands,
    order_problems,
    refusal,
    serial_effects,
    stale_problems,
)
from swpipe.task import PipelineTask
from swpipe.verify import check, tasks_given


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found in order.

    Attributes:
        orders: How many orders between two tasks had to be kept, and are. None at all mean that
            nothing is known of what the tasks touch.
        footprint: What may be in flight at most; None where no sizes were given.
    """

    orders: int
    footprint: Footprint | None


def verify(
    plan: PipelinePlan,
    tasks: Iterable[PipelineTask] | None = None,
    effects: EffectTable | None = None,
    *,
    streams: bool | None = None,
    sizes: Sizes | None = None,
    budget_bytes: int | None = None,
) -> Verified:
    """Make sure that a plan gives the numbers of the serial run in every interleaving.

    What is known of the tasks is what is checked: the states that they declare, and ``effects``,
    which a recorded iteration gives. Serial order is that in which a pipeline would run the tasks
    serially: as given, as far as the dependences within an iteration allow.

    Args:
        plan: The plan.
        tasks: The tasks that it is to run; their declared states are checked. May be left out where
            ``effects`` are given, or the plan has the tasks themselves.
        effects: What each task touches, in serial order; joined with what the tasks declare.
        streams: Whether the device has streams. None asks for both kinds of device: stream order
            keeps tasks apart that are free on a CPU, and program order keeps tasks apart on a CPU
            that streams let go. A plan that is right on one kind only is refused then, which the
            message says.
        sizes: Task to attribute to bytes, in serial order, as recorded.
        budget_bytes: What may be in flight at most; needs ``sizes``.

    Returns:
        How much there was to check, and the memory's bound.

    Raises:
        PlanError: Lists all that is wrong.
        TypeError: Neither tasks nor effects, or a budget without sizes.
    """
    given = tasks_given(plan, tasks)
    if not given and effects is None:
        raise TypeError("verify needs the tasks, or a table of their effects: give one of the two")
    if budget_bytes is not None and sizes is None:
        raise TypeError("a budget needs sizes to check against: give those of a recorded iteration")
    check(plan, given or _stand_ins(plan), _device_type(plan))
    table = _merged(given, effects or {})
    problems = [*_name_problems(plan, table), *size_problems(plan, sizes or {})]
    late = streams is not False  # with streams memory comes back later: the bound is larger
    if not problems:
        table = serial_effects(plan, table)
        problems = [*stale_problems(plan, table), *order_problems(plan, table, streams=streams)]
        if sizes is not None and budget_bytes is not None:
            problems += memory_problems(plan, sizes, budget_bytes, streams=late)
    if problems:
        raise refusal(plan, problems)
    return Verified(
        orders=len(set(demands(table, plan.stale))),
        footprint=None if sizes is None else bytes_in_flight(plan, sizes, streams=late),
    )


def _stand_ins(plan: PipelinePlan) -> Sequence[PipelineTask]:
    """Tasks for a plan on paper."""
    return [PipelineTask(name, _nothing) for name in plan.schedule]


def _nothing(ctx: IterContext) -> None:
    """A task on paper."""


def _device_type(plan: PipelinePlan) -> str:
    """Of the device that the plan's own streams belong to, if it brings any."""
    own = [s.stream for s in plan.schedule.values() if isinstance(s.stream, torch.Stream)]
    return own[0].device.type if own else "cpu"


def _merged(tasks: Sequence[PipelineTask], effects: EffectTable) -> dict[str, Effects]:
    """What is declared and what was recorded; in the order of the tasks, where there are any."""
    declared = declared_effects(tasks)
    names = dict.fromkeys((*declared, *effects))
    nothing = Effects()
    return {name: declared.get(name, nothing) | effects.get(name, nothing) for name in names}


def _name_problems(plan: PipelinePlan, table: EffectTable) -> Iterator[Problem]:
    for name in table:
        if name not in plan.schedule:
            yield Problem(
                f"effects name task {name!r}, which the plan does not schedule (it has: "
                f"{', '.join(plan.schedule)}): they belong to other tasks"
            )
    for name in plan.schedule:
        if name not in table:
            yield Problem(
                f"nothing is known of what task {name!r} touches: give it an entry in effects, "
                "Effects() if it touches nothing",
                (name,),
            )
