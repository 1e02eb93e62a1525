"""Plans that were tried on a few ranks, as they would do on many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from swpipe._engine.program import compile_plan
from swpipe.core.costs import CostModel
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.planning.rank_simulation import step_us
from swpipe.planning.ranks import Ranks
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
    """Return the candidates with what ranks beyond those they were tried on add to their steps.

    Args:
        candidates: Tried.
        costs: A cost for each task.
        ranks: What is planned for.
        like: Says which tasks are globally ordered; a serial plan does not.
        tried_on: How many ranks there were in the trial.
        streams: Whether the device has streams.
    """
    found = []
    for each in candidates:
        schedule = {
            name: replace(entry, globally_ordered=like.schedule[name].globally_ordered)
            for name, entry in each.plan.schedule.items()
        }
        ordered = replace(each.plan, schedule=schedule)
        program = compile_plan(resolve_plan(ordered), streams=streams)
        few, many = (
            step_us(program, costs, replace(ranks, number=number))
            for number in (tried_on, ranks.number)
        )
        more_us = many - few
        found.append(
            replace(
                each,
                predicted_us=each.predicted_us + more_us,
                rounds_us=tuple(us + more_us for us in each.rounds_us),
            )
        )
    return tuple(found)
