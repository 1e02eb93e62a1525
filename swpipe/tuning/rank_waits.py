"""The times of plans that were tried on a few ranks, extrapolated to many ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from swpipe.core.costs import CostModel
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.planning.rank_simulation import step_us
from swpipe.planning.ranks import Ranks
from swpipe.program import compile_plan
from swpipe.tuning.tried_plans import Candidate


def on_ranks(
    candidates: Iterable[Candidate],
    costs: CostModel,
    ranks: Ranks,
    like: PipelinePlan,
    *,
    tried_on: int,
    streams: bool,
) -> tuple[Candidate, ...]:
    """Return the candidates with the additional waits of more ranks added to their step times.

    Args:
        candidates: The candidates that were tried.
        costs: A cost for each task.
        ranks: The ranks to plan for.
        like: A plan that marks the globally ordered tasks, which a serial plan does not.
        tried_on: The number of ranks in the trial.
        streams: Whether the device has streams.
    """
    extrapolated = []
    for each in candidates:
        # Without the global order, the simulation would not let ranks wait for one another.
        schedule = {
            name: replace(entry, globally_ordered=like.schedule[name].globally_ordered)
            for name, entry in each.plan.schedule.items()
        }
        ordered = replace(each.plan, schedule=schedule)
        program = compile_plan(resolve_plan(ordered), streams=streams)
        # Both steps are simulated with the same costs and jitter, so that their difference contains
        # the effect of the number of ranks only. Errors of the simulation itself cancel.
        few, many = (
            step_us(program, costs, replace(ranks, number=number))
            for number in (tried_on, ranks.number)
        )
        more_us = many - few
        extrapolated.append(
            replace(
                each,
                predicted_us=each.predicted_us + more_us,
                rounds_us=tuple(us + more_us for us in each.rounds_us),
            )
        )
    return tuple(extrapolated)
