"""Who holds a resource when, modulo the initiation interval: a ring of time for each resource."""

from __future__ import annotations

from collections.abc import Iterator

EPS_US = 1e-6
"""Times that differ by less are the same."""


class Ring:
    """One resource over one period, closed to a ring: what is taken now is taken every period.

    Attributes:
        period_us: The initiation interval.
        slack_us: What is left of the period once all is placed. A gap that is no longer may stay
            between two operations; a longer one is kept in one piece.
        taken: Task to its start within the period and its time.
    """

    __slots__ = ("period_us", "slack_us", "taken")

    def __init__(self, period_us: float, slack_us: float) -> None:
        self.period_us = period_us
        self.slack_us = slack_us
        self.taken: dict[int, tuple[float, float]] = {}

    def put(self, task: int, start_us: float, time_us: float) -> None:
        """Take it for a task."""
        self.taken[task] = (start_us % self.period_us, time_us)

    def clashes(self, start_us: float, time_us: float) -> Iterator[tuple[int, float, float]]:
        """The tasks in the way of a start: each with how much later, and sooner, would be clear."""
        period = self.period_us
        for task, (begin, length) in self.taken.items():
            after = (start_us - begin) % period
            if after > period - EPS_US:
                after -= period
            if after < length - EPS_US and (after > EPS_US or time_us > EPS_US):
                yield task, length - after, after + time_us
            elif after + time_us > period + EPS_US:
                yield task, period - after + length, after + time_us - period

    def later_us(self, start_us: float, time_us: float) -> float:
        """How much later a start would be clear of those in its way; 0 if it is clear."""
        return max((later for _, later, _ in self.clashes(start_us, time_us)), default=0.0)

    def sooner_us(self, start_us: float, time_us: float) -> float:
        """How much sooner a start would be clear of those in its way; 0 if it is clear."""
        return max((sooner for _, _, sooner in self.clashes(start_us, time_us)), default=0.0)

    def snug_us(self, start_us: float, time_us: float) -> float:
        """How much later a clear start would leave no gap that the resource cannot spare."""
        if not self.taken:
            return 0.0
        period = self.period_us
        left = min((start_us - b - t + EPS_US) % period for b, t in self.taken.values())
        right = min((b - start_us - time_us + EPS_US) % period for b, _ in self.taken.values())
        return max(0.0, right - EPS_US) if min(left, right) > self.slack_us + 2 * EPS_US else 0.0
