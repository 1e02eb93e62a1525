"""A forecast of the time that a step waits for the slowest rank, on few and on many ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from swpipe.core.messages import in_ms
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.planning import Limits, RankStep
from swpipe.planning.modulo.input_slack import with_slack
from swpipe.planning.rank_simulation import rank_step
from swpipe.profiler.rank_differences import RankDifferences
from swpipe.program import compile_plan

MANY = 1_024
"""The smallest number of ranks for which ``RankForecast.many`` is computed."""

# How many iterations more than the plan's depth a plan with slack may have in flight.
_SLACK = 2
# The smallest gain that the text mentions, as a share of the step.
_WORTH_IT = 0.01


@dataclass(frozen=True, slots=True)
class RankForecast:
    """The step on the measured ranks, on many ranks, and on many ranks with input slack.

    Attributes:
        differences: The differences between the measured ranks.
        few: The step on the number of ranks that were measured.
        many: The step on ``MANY`` ranks, or on the measured ranks if they are more.
        slack_us: The step time on many ranks, in microseconds, under a plan that absorbs more
            jitter; ``many.step_us`` without this plan.
        slack: The changes of that plan, in words.
    """

    differences: RankDifferences
    few: RankStep
    many: RankStep
    slack_us: float
    slack: str

    @property
    def text(self) -> str:
        """The forecast in sentences: the waits, the gain of slack, the slowest rank and task."""
        few = self.few
        many = self.many
        # A wait that comes out below 0 is none.
        waits = [max(0.0, step.slowest_us) / step.step_us for step in (few, many)]
        saved = 1 - self.slack_us / many.step_us
        slack = f"; with {self.slack} {saved:.0%} less" if saved > _WORTH_IT else ""
        of = self.differences
        longer = f"; {of.task} takes it {in_ms(of.longer_us)} longer" if of.longer_us > 0 else ""
        return (
            f"On {few.ranks.number} ranks {waits[0]:.0%} of the step is waiting for the slowest; "
            f"on {many.ranks.number:,} expect {waits[1]:.0%}{slack}. Rank {of.slowest} is the "
            f"slowest{longer}."
        )


def rank_forecast(
    plan: PipelinePlan,
    differences: RankDifferences,
    *,
    streams: bool,
    allowed: Callable[[PipelinePlan], bool],
) -> RankForecast:
    """Return the forecast for a plan with globally ordered tasks.

    Args:
        plan: The plan of the loop, with its global order.
        differences: The differences between the measured ranks.
        streams: Whether the device has streams.
        allowed: Returns whether a plan keeps the numbers of the loop.
    """
    costs = differences.costs
    ranks = differences.ranks
    program = compile_plan(resolve_plan(plan), streams=streams)
    many = replace(ranks, number=max(MANY, ranks.number))
    # A plan with its own run_ahead keeps it: its author has set this limit.
    best, _ = with_slack(
        plan,
        costs,
        many,
        Limits(in_flight=plan.depth + _SLACK, groups=len(plan.thread_groups) + 1),
        streams=streams,
        may_run_ahead=plan.run_ahead is None,
        allowed=allowed,
    )
    # Both steps are those of the present plan: only the number of ranks differs.
    return RankForecast(
        differences,
        few=rank_step(program, costs, ranks),
        many=rank_step(program, costs, many),
        slack_us=best.step_us,
        slack=best.words,
    )
