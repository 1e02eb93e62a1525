"""What of a step is waiting for the slowest rank: on the ranks there are, and on many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from swpipe._engine.program import compile_plan
from swpipe.core.messages import in_ms
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.planning import Limits, RankStep
from swpipe.planning.modulo.input_slack import with_slack
from swpipe.planning.rank_simulation import rank_step
from swpipe.profiler.rank_differences import RankDifferences

MANY = 1_024
"""The ranks that are forecast."""

_SLACK = 2
_WORTH_IT = 0.01


@dataclass(frozen=True, slots=True)
class RankForecast:
    """The step on the ranks that were measured, on many, and with input slack there.

    Attributes:
        differences: How the measured ranks differ.
        few: The step on as many ranks as were measured.
        many: The same on ``MANY``.
        slack_us: The step of many ranks under the plan that absorbs more; ``many.step_us`` if none.
        slack: What that plan has more, in words.
    """

    differences: RankDifferences
    few: RankStep
    many: RankStep
    slack_us: float
    slack: str

    @property
    def text(self) -> str:
        """Sentences: the waits, what takes them away, and the slowest rank and its task."""
        few = self.few
        many = self.many
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
    """Return the forecast for a plan in which some tasks meet.

    Args:
        plan: What the loop runs under, with its global order.
        differences: Of the ranks that were measured.
        streams: Whether the device has streams.
        allowed: Whether a plan gives the loop's numbers.
    """
    costs = differences.costs
    ranks = differences.ranks
    program = compile_plan(resolve_plan(plan), streams=streams)
    many = replace(ranks, number=max(MANY, ranks.number))
    best, _ = with_slack(
        plan,
        costs,
        many,
        Limits(in_flight=plan.depth + _SLACK, threads=plan.threads + 1),
        streams=streams,
        may_run_ahead=plan.run_ahead is None,
        allowed=allowed,
    )
    return RankForecast(
        differences,
        few=rank_step(program, costs, ranks),
        many=rank_step(program, costs, many),
        slack_us=best.step_us,
        slack=best.words,
    )
