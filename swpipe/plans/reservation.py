"""Who holds a resource when, modulo the initiation interval: a ring of time for each resource."""

from __future__ import annotations

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

    def clashing(self, start_us: float, time_us: float) -> set[int]:
        """The tasks that have some of that time."""
        period, found = self.period_us, set()
        for task, (begin, length) in self.taken.items():
            after = (start_us - begin + EPS_US) % period - EPS_US
            inside = after < length - EPS_US and (after > EPS_US or time_us > EPS_US)
            if inside or after + time_us > period + EPS_US:
                found.add(task)
        return found

    def later_us(self, start_us: float, time_us: float) -> float:
        """How much later a start would be clear of those in its way; 0 if it is clear."""
        period, later = self.period_us, 0.0
        for begin, length in self.taken.values():
            after = (start_us - begin + EPS_US) % period - EPS_US
            if after < length - EPS_US and (after > EPS_US or time_us > EPS_US):
                if length - after > later:
                    later = length - after
            elif after + time_us > period + EPS_US and period - after + length > later:
                later = period - after + length
        return later

    def sooner_us(self, start_us: float, time_us: float) -> float:
        """How much sooner a start would be clear of those in its way; 0 if it is clear."""
        period, sooner = self.period_us, 0.0
        for begin, length in self.taken.values():
            after = (start_us - begin + EPS_US) % period - EPS_US
            if after < length - EPS_US and (after > EPS_US or time_us > EPS_US):
                sooner = max(sooner, after + time_us)
            elif after + time_us > period + EPS_US:
                sooner = max(sooner, after + time_us - period)
        return sooner

    def snug_us(self, start_us: float, time_us: float) -> float:
        """How much later a clear start would leave no gap that the resource cannot spare."""
        if not self.taken:
            return 0.0
        period = self.period_us
        left = min([(start_us - b - t + EPS_US) % period for b, t in self.taken.values()])
        if left <= self.slack_us + 2 * EPS_US:
            return 0.0
        right = min([(b - start_us - time_us + EPS_US) % period for b, _ in self.taken.values()])
        return max(0.0, right - EPS_US) if right > self.slack_us + 2 * EPS_US else 0.0
